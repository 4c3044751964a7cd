"""YAML file + parts + `a.b=value` overrides -> RunConfig, every fault told as `KEY: VALUE; rule: ...; fix: ...`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jetrl_megatron.config.errors import ConfigError, Violation, one_line, show
from jetrl_megatron.config.schema import RunConfig
from jetrl_megatron.config.translate import translate
from jetrl_megatron.config.yaml_io import dump_yaml, parse_yaml

PATH_KEYS = (("model", "path"), ("data", "path"), ("eval", "path"), ("sync", "staging_dir"))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read `path`, apply `overrides` from left to right, and validate.

    An override is `a.b=value` (the value parsed as YAML), or a YAML file with some keys of the schema (a part: a
    precision, a layout, ...), whose values replace those of the same keys.

    Relative paths in the configuration stay relative to the current directory; a leading `~` is expanded.
    Raises ConfigError: missing or unreadable file, YAML fault, unknown key, wrong type, broken rule.
    """
    data = _read(Path(path))
    for override in overrides:
        _apply(data, override)
    _expand_home(data)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(translate(error)) from None


def dump_config(cfg: RunConfig) -> str:
    """The resolved configuration (every key, defaults included) as YAML; `load_config` reads back an equal one."""
    return dump_yaml(cfg.model_dump(mode="python"))


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([Violation("config", str(path), "an existing YAML file", "correct the path")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            [Violation("config", str(path), f"a readable UTF-8 YAML file ({one_line(error)})", "correct the file")]
        ) from None
    data = _parse(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            [Violation("config", str(path), "a mapping of sections (model:, data:, ...)", "see `jetrl schema`")]
        )
    return data


def _parse(text: str, source: str) -> Any:
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        problem = one_line(getattr(error, "problem", None) or error)
    except (ValueError, RecursionError) as error:  # an impossible date such as 2026-13-01; absurd nesting
        where, problem = source, one_line(error)
    raise ConfigError([Violation("config", where, f"valid YAML ({problem})", "correct that line")])


def _merge(data: dict[str, Any], part: dict[str, Any]) -> None:
    """Set every leaf of `part`; sections are merged, anything else (lists, model.architecture) is replaced."""
    for section, values in part.items():
        if isinstance(values, dict) and isinstance(data.get(section), dict):
            data[section] = {**data[section], **values}
        else:
            data[section] = values


def _apply(data: dict[str, Any], override: str) -> None:
    if "=" not in override and override.endswith((".yaml", ".yml")):
        _merge(data, _read(Path(override)))
        return
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            [Violation("override", show(override), "the form section.key=value", "e.g. trainer.num_steps=20")]
        )
    value = _parse(text, f"override {key.strip()}")
    node = data
    for depth, part in enumerate(parts[:-1], start=1):
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(
                [
                    Violation(
                        f"override {key.strip()}",
                        show(value),
                        f"{'.'.join(parts[:depth])} is a section, but it holds {show(child)}",
                        "set an existing key, see `jetrl schema`",
                    )
                ]
            )
        node[part] = dict(child)  # a YAML alias may hold the same mapping elsewhere
        node = node[part]
    node[parts[-1]] = value


def _expand_home(data: dict[str, Any]) -> None:
    for section, key in PATH_KEYS:
        node = data.get(section)
        value = node.get(key) if isinstance(node, dict) else None
        if isinstance(node, dict) and isinstance(value, str) and value.startswith("~"):
            try:
                node[key] = str(Path(value).expanduser())
            except RuntimeError:
                raise ConfigError(
                    [Violation(f"{section}.{key}", show(value), "a user whose home folder exists", "write it out")]
                ) from None
