"""What a run writes down: metrics.jsonl, TensorBoard events, samples, optionally Weights & Biases.

`metrics.jsonl` holds one strict-JSON object per step. Its keys are flat, `section/name`, units in the name. JSON has no
NaN: a number that is not finite is written as null and named in `nonfinite`, e.g.
`{"step": 3, "mismatch/max_abs_dlogp": null, "nonfinite": {"mismatch/max_abs_dlogp": "nan"}}`; `read_metrics` puts it
back. A line is appended with one write, and an unfinished last line (a killed run) is dropped on resume.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.config.schema import LoggingConfig
from jetrl_megatron.samples import Sample

METRICS_FILE = "metrics.jsonl"
NONFINITE_KEY = "nonfinite"


def encode_row(step: int, metrics: Mapping[str, Any]) -> str:
    """One line of metrics.jsonl, with the newline. Values: numbers (0-d tensors too), text, booleans or None.
    Raises ValueError for another type or a reserved key."""
    row: dict[str, Any] = {"step": step}
    nonfinite: dict[str, str] = {}
    for key, value in metrics.items():
        if key in ("step", NONFINITE_KEY):
            raise ValueError(f"metric {key!r}; rule: `step` and `{NONFINITE_KEY}` are reserved; fix: another name")
        if value is not None and not isinstance(value, str | bool | int):
            if not hasattr(value, "__float__"):
                raise ValueError(f"metric {key!r}: {type(value).__name__}; rule: a number or text; fix: convert it")
            value = float(value)
            if not math.isfinite(value):
                nonfinite[key], value = str(value), None
        row[key] = value
    if nonfinite:
        row[NONFINITE_KEY] = nonfinite
    return json.dumps(row, allow_nan=False) + "\n"


def decode_row(line: str) -> dict[str, Any]:
    """Inverse of `encode_row`: NaN and infinities are floats again."""
    row: dict[str, Any] = json.loads(line)
    for key, name in row.pop(NONFINITE_KEY, {}).items():
        row[key] = float(name)
    return row


def _complete_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All complete rows of a run's metrics.jsonl, in order; an unfinished last line is left out.
    Raises ValueError if the file is missing."""
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: missing; rule: a run folder has it once a step is done; fix: the folder")
    return [decode_row(line) for line in _complete_lines(path)]


def _truncate(path: Path, resume_step: int) -> None:
    """Keeps the rows of steps <= resume_step, by rename."""
    kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= resume_step]
    handle, staging = tempfile.mkstemp(prefix=".metrics.", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.chmod(staging, 0o644)
    os.replace(staging, path)


class MetricsWriter:
    """Writes the metrics of a run; for the one process that owns the run folder.

    run_dir: created if missing. resume_step: the last step that is done, None for a fresh run. On resume, rows and
    sample files of later steps are removed, as those steps run again. Raises ValueError if a fresh run finds metrics of
    another one, or if a configured sink is not installed.
    """

    def __init__(
        self, run_dir: Path, logging_cfg: LoggingConfig, resume_step: int | None = None, wandb_config: Any = None
    ) -> None:
        self._dir, self._cfg = Path(run_dir), logging_cfg
        self._samples = self._dir / "samples"
        path = self._dir / METRICS_FILE
        self._dir.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            _truncate(path, resume_step)
            self._drop_samples_after(resume_step)
        elif path.exists() and path.stat().st_size:
            raise ValueError(f"{path}: has metrics of another run; fix: resume that run or choose another run folder")
        self._tensorboard = _open_tensorboard(self._dir, resume_step) if logging_cfg.tensorboard else None
        self._wandb = _open_wandb(self._dir, logging_cfg.wandb_project, wandb_config)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _drop_samples_after(self, step: int) -> None:
        for path in self._samples.glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends one row and sends its finite numbers to the other sinks."""
        line = encode_row(step, metrics).encode()
        written = os.write(self._file, line)
        assert written == len(line), "short write to metrics.jsonl"
        numbers = {
            key: float(value)
            for key, value in decode_row(line.decode()).items()
            if key != "step" and isinstance(value, int | float)
        }
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, global_step=step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def write_samples(self, step: int, samples: Iterable[Sample]) -> Path | None:
        """Writes the first `logging.samples_per_step` samples to samples/step_NNNNNN.jsonl, by rename; None if 0."""
        if not self._cfg.samples_per_step:
            return None
        self._samples.mkdir(exist_ok=True)
        path = self._samples / f"step_{step:06d}.jsonl"
        chosen = list(samples)[: self._cfg.samples_per_step]
        write_atomic(path, "".join(json.dumps(s.as_record(), ensure_ascii=False) + "\n" for s in chosen))
        return path

    def close(self) -> None:
        os.close(self._file)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_tensorboard(run_dir: Path, resume_step: int | None) -> Any:
    """Events of steps that run again are hidden by purge_step."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "logging.tensorboard: true; rule: needs the package tensorboard; "
            "fix: pip install tensorboard, or logging.tensorboard=false"
        ) from error
    purge_step = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)


def _open_wandb(run_dir: Path, project: str | None, config: Any) -> Any:
    """A W&B run that resumes: its id is kept in the run folder."""
    if project is None:
        return None
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"logging.wandb_project: {project}; rule: needs the package wandb; "
            "fix: pip install wandb, or logging.wandb_project=null"
        ) from error
    id_file = run_dir / "wandb_id.txt"
    if not id_file.exists():
        id_file.write_text(wandb.util.generate_id())
    return wandb.init(
        project=project, name=run_dir.name, dir=str(run_dir), id=id_file.read_text(), resume="allow", config=config
    )
