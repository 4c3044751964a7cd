"""Every file fault that can be seen before a process is started or torch is imported."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl_megatron.config.checkpoint_files import check_tensors, is_torch_dist, load_json, model_folder
from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.errors import ConfigError, Violation, one_line, show
from jetrl_megatron.config.schema import RunConfig

REWARD_KINDS = ("exact_match", "math_verify", "gsm8k")
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
MAX_ROW_FAULTS = 5
_FUNCTION = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")


def read_dims(cfg: RunConfig) -> ModelDims:
    """Dims of the policy: from the config.json of model.path (init: hf) or model.architecture. Raises ConfigError."""
    if cfg.model.init == "hf":
        folder = Path(cfg.model.path or "").expanduser()
        if not folder.is_dir():
            raise ConfigError([Violation("model.path", str(folder), "an existing checkpoint", "correct the path")])
        folder = model_folder(folder)
        source, (config, faults) = f"model.path ({folder}/config.json)", load_json(folder / "config.json", "model.path")
        if faults:
            raise ConfigError(faults)
    else:
        source, config = "model.architecture", dict(cfg.model.architecture or {})
    try:
        return ModelDims.from_hf(config)
    except ValueError as error:
        raise ConfigError([f"{source}: {error}"]) from None


def preflight(cfg: RunConfig, run_dir: Path) -> None:
    """Check model, data, reward and folders; raises ConfigError with one line per fault."""
    faults: list[str | Violation] = []
    try:
        dims = read_dims(cfg)
    except ConfigError as error:
        faults += error.errors
    else:
        if cfg.model.init == "hf":
            faults += _model_faults(cfg, Path(cfg.model.path or "").expanduser(), dims)
    faults += _data_faults(cfg)
    faults += _reward_faults(cfg)
    faults += _folder_faults(cfg, run_dir)
    if faults:
        raise ConfigError(faults)


def check_flow_precision(cfg: RunConfig) -> list[Violation]:
    """Unequal precisions that the check at start-up would refuse, known before anything is started."""
    precision = cfg.precision
    if precision.train == precision.rollout or precision.flow_check == "warn":
        return []
    value = f"error with precision.train={precision.train}, precision.rollout={precision.rollout}"
    rule = "training and rollout run one precision flow"
    return [Violation("precision.flow_check", value, rule, "make them equal, or set precision.flow_check=warn")]


def _model_faults(cfg: RunConfig, folder: Path, dims: ModelDims) -> Iterator[Violation]:
    if is_torch_dist(folder):  # its tensors are checked by Megatron's reader, before an engine is started
        folder = model_folder(folder)
    else:
        yield from check_tensors(folder, dims)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        rule = "holds tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
        yield Violation("model.path", str(folder), rule, "add the tokenizer's files")
    elif not cfg.data.generated and cfg.data.chat_template and not _has_chat_template(folder):
        rule = f"the tokenizer in {folder} has a chat template"
        yield Violation("data.chat_template", "true", rule, "set data.chat_template=false or use an instruct model")


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config, faults = load_json(folder / "tokenizer_config.json", "model.path")
    return not faults and bool(config.get("chat_template"))


def _data_faults(cfg: RunConfig) -> Iterator[Violation]:
    data = cfg.data
    if data.task == "jsonl" and data.path is not None:
        yield from check_jsonl("data.path", Path(data.path), data.prompt_field, data.answer_field)
    if (
        data.task == "hf"
        and data.path is not None
        and data.path.startswith((".", "/"))
        and not Path(data.path).exists()
    ):
        yield Violation("data.path", data.path, "an existing folder or an HF datasets name", "correct the path")
    if cfg.eval.path is not None:
        yield from check_jsonl("eval.path", Path(cfg.eval.path), data.prompt_field, data.answer_field)


def check_jsonl(key: str, path: Path, prompt_field: str, answer_field: str) -> Iterator[Violation]:
    """Faults of a JSONL file, at most MAX_ROW_FAULTS rows and then a count. Blank lines are allowed."""
    if not path.is_file():
        yield Violation(key, str(path), "an existing JSONL file", "correct the path")
        return
    num_rows, num_faults = 0, 0
    try:
        with path.open(encoding="utf-8") as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                num_rows += 1
                fault = _row_fault(f"{path}:{number}", line, prompt_field, answer_field)
                if fault is not None:
                    num_faults += 1
                    if num_faults <= MAX_ROW_FAULTS:
                        yield fault
    except (OSError, UnicodeDecodeError) as error:
        yield Violation(key, str(path), f"a readable UTF-8 file ({one_line(error)})", "save it as UTF-8")
        return
    if num_faults > MAX_ROW_FAULTS:
        yield Violation(
            key, str(path), "every row is valid", f"correct {num_faults - MAX_ROW_FAULTS} more rows as well"
        )
    if num_rows == 0:
        yield Violation(key, str(path), "holds at least one row", "add rows")


def _row_fault(where: str, line: str, prompt_field: str, answer_field: str) -> Violation | None:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Violation(where, show(line.strip()), f"one JSON object per line ({one_line(error)})", "correct the row")
    if not isinstance(row, dict):
        return Violation(where, show(row), "a JSON object", "write {...} with the prompt and answer fields")
    for option, field, kinds, rule in (
        ("data.prompt_field", prompt_field, (str,), "non-empty text"),
        ("data.answer_field", answer_field, (str, int, float), "text or a number"),
    ):
        if field not in row:
            have = ", ".join(map(str, list(row)[:8])) or "none"
            return Violation(
                where, f"no field {field!r}", f"has the field of {option}", f"set {option} to one of: {have}"
            )
        value = row[field]
        if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, str) and not value.strip()):
            return Violation(where, f"field {field!r} is {show(value)}", rule, "correct the row")
    return None


def _reward_faults(cfg: RunConfig) -> Iterator[Violation]:
    kind = cfg.reward.kind
    if kind not in REWARD_KINDS and not _FUNCTION.match(kind):
        rule = f"one of {', '.join(REWARD_KINDS)}, or package.module:function"
        yield Violation("reward.kind", show(kind), rule, "e.g. reward.kind=exact_match")


def _folder_faults(cfg: RunConfig, run_dir: Path) -> Iterator[Violation]:
    existing = run_dir.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        yield Violation("run_dir", str(run_dir), f"a folder, but {existing} is a file", "choose another --run-dir")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Violation("run_dir", str(run_dir), f"writable, but {existing} is not", "choose another --run-dir")
    staging = Path(cfg.sync.staging_dir)
    if not staging.is_dir() or not os.access(staging, os.W_OK | os.X_OK):
        yield Violation(
            "sync.staging_dir", str(staging), "an existing writable folder", "set it to a folder on this host"
        )
