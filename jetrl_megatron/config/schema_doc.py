"""The schema as data and as text: every dotted key with its type, rules, default and one-line help."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jetrl_megatron.config.errors import show
from jetrl_megatron.config.schema import RunConfig

_NAMES: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null"}


@dataclass(frozen=True)
class KeyDoc:
    """One key of the schema. `section` keys hold other keys; `open` keys take any sub-key (model.architecture)."""

    key: str
    type: str
    default: str
    help: str
    section: bool = False
    open: bool = False
    choices: tuple[str, ...] = ()


def type_text(annotation: Any) -> str:
    """A type in the user's words, e.g. `integer | null` or `bf16 | fp8`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(a) for a in args)
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _NAMES.get(annotation, str(annotation))


def rules_text(info: FieldInfo) -> str:
    """Numeric rules, e.g. `>= 0, < 1`; empty without any."""
    parts = []
    for rule in info.metadata:
        if isinstance(rule, annotated_types.Ge):
            parts.append(f">= {rule.ge}")
        elif isinstance(rule, annotated_types.Gt):
            parts.append(f"> {rule.gt}")
        elif isinstance(rule, annotated_types.Le):
            parts.append(f"<= {rule.le}")
        elif isinstance(rule, annotated_types.Lt):
            parts.append(f"< {rule.lt}")
    return ", ".join(parts)


def walk(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[KeyDoc]:
    """Every key in schema order, sections before their keys."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        annotation = info.annotation
        text = info.description or ""
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield KeyDoc(key, "section", "required" if info.is_required() else "", text, section=True)
            yield from walk(annotation, key + ".")
            continue
        kind, rules = type_text(annotation), rules_text(info)
        default = "required" if info.is_required() else show(info.default)
        yield KeyDoc(
            key,
            f"{kind}, {rules}" if rules else kind,
            default,
            text,
            open=kind.startswith("mapping"),
            choices=tuple(map(str, typing.get_args(annotation))) if typing.get_origin(annotation) is Literal else (),
        )


def schema_text() -> str:
    """What `jetrl schema` prints."""
    lines = ["# key: type (default) -- help. Sections model and data are required."]
    for doc in walk():
        if doc.section:
            lines += ["", f"{doc.key}: -- {doc.help}" + (" (required)" if doc.default == "required" else "")]
        else:
            lines.append(f"  {doc.key}: {doc.type} ({doc.default}) -- {doc.help}")
    return "\n".join(lines) + "\n"
