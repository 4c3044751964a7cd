"""The exactness matrix: layouts x models x formats, each cell a real run of `jetrl train` with its maximal |dlogp|.

A cell trains a tiny random model for two steps in its layout, with real engines in theirs: the second step follows a
weight update and sync. Every response token of both steps is compared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.trainer.metrics import METRICS_FILE, read_metrics

MIN_TOKENS = 2000
TABLE = "exactness.json"
_SHAPE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
    "rope_theta": 10000.0,
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"model_type": "llama", "intermediate_size": 512, "tie_word_embeddings": True, **_SHAPE},
    "Qwen2.5": {
        "model_type": "qwen2",
        "intermediate_size": 512,
        "tie_word_embeddings": False,
        **_SHAPE,
        "num_attention_heads": 4,  # head_dim is hidden_size / heads in SGLang's Qwen2
        "num_key_value_heads": 2,
    },
    "Qwen3": {"model_type": "qwen3", "intermediate_size": 512, "tie_word_embeddings": False, **_SHAPE},
    "Qwen3-MoE": {"model_type": "qwen3_moe", "intermediate_size": 512, "tie_word_embeddings": False, **_SHAPE, **_MOE},
}
FORMATS: dict[str, dict[str, str]] = {
    "FP8 128x128, fp32 scales": {},
    "FP8 128x128, pow2 scales": {"scale_format": "pow2"},
    "FP8 per row": {"granularity": "channel"},
    "BF16": {"train": "bf16", "rollout": "bf16"},
}
BLOCK_FP8 = next(iter(FORMATS))
EMULATED: Final = "emulated"
# name: (parallel, rollout, trainer)
Layout = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
DENSE_LAYOUTS: dict[str, Layout] = {
    "TP 1": ({}, {}, {}),
    "TP 1, one sequence per micro-batch, recompute": ({}, {}, {"micro_batch_tokens": 96, "recompute": True}),
    "TP 2": ({"tensor": 2}, {}, {}),
    "TP 2 + SP": ({"tensor": 2, "sequence": True}, {}, {}),
    "TP 4": ({"tensor": 4}, {}, {}),
    "PP 2": ({"pipeline": 2}, {}, {}),
    "PP 2, VPP 2": ({"pipeline": 2, "virtual_pipeline": 2}, {}, {}),
    "DP 2": ({"data": 2}, {}, {}),
    "TP 2 + SP, PP 2": ({"tensor": 2, "sequence": True, "pipeline": 2}, {}, {}),
    "TP 1, engine TP 2": ({}, {"tensor_parallel": 2}, {}),
    "TP 2, engine TP 2": ({"tensor": 2}, {"tensor_parallel": 2}, {}),
}
MOE_LAYOUTS: dict[str, Layout] = {
    "TP 1": ({}, {}, {}),
    "EP 2": ({"expert": 2}, {}, {}),
    "TP 2 + SP, EP 2": ({"tensor": 2, "sequence": True, "expert": 2}, {}, {}),
    "PP 2": ({"pipeline": 2}, {}, {}),
    "PP 2, EP 2": ({"pipeline": 2, "expert": 2}, {}, {}),
    "TP 1, engine TP 2": ({}, {"tensor_parallel": 2}, {}),
    "EP 2, engine TP 2 EP 2": ({"expert": 2}, {"tensor_parallel": 2, "expert_parallel": 2}, {}),
}


@dataclass(frozen=True)
class Cell:
    """backend: of the FP8 linears, `precision.backend`."""

    model: str
    layout: str
    format: str
    backend: str = EMULATED

    @property
    def _layout(self) -> Layout:
        return (MOE_LAYOUTS if self.is_moe else DENSE_LAYOUTS)[self.layout]

    @property
    def _num_ranks(self) -> tuple[int, int]:
        """Of the training, and of one engine."""
        parallel, rollout, _ = self._layout
        sizes = ParallelConfig(**parallel)
        return sizes.model_size * (sizes.data or sizes.least_data), rollout.get("tensor_parallel", 1)

    @property
    def num_gpus(self) -> int:
        """GPUs that the cell needs on a machine with GPUs: engines share those of the training where they divide them
        evenly, else one engine stands beside."""
        training, engine = self._num_ranks
        return training if training % engine == 0 else training + engine

    @property
    def is_moe(self) -> bool:
        return "num_experts" in MODELS[self.model]

    def config(self) -> dict[str, Any]:
        """The run configuration of the cell."""
        parallel, rollout, trainer = self._layout
        if self.backend != EMULATED:
            parallel = {**parallel, "tp_invariant": False}
            training, engine = self._num_ranks
            rollout = {**rollout, "num_engines": max(training // engine, 1)}
        return {
            "model": {"init": "random", "architecture": MODELS[self.model]},
            "precision": {**FORMATS[self.format], "dgrad": "bf16", "wgrad": "bf16", "backend": self.backend},
            "parallel": parallel,
            "rollout": {"max_new_tokens": 40, "samples_per_prompt": 8, **rollout},
            "data": {"task": "chain", "min_digits": 8, "max_digits": 24, "max_prompt_tokens": 40},
            "reward": {"kind": "exact_match"},
            "optimizer": {"lr": 1e-3},
            "mismatch": {"require_exact": False},  # the number is wanted, also where it is not 0
            "checkpoint": {"every_steps": 0, "export_hf": False},
            "logging": {"tensorboard": False, "progress": False},
            "trainer": {"num_steps": 2, "prompts_per_step": 16, **trainer},
        }


@dataclass(frozen=True)
class Result:
    """max_abs_dlogp over num_tokens response tokens; error: why the run ended, if it failed."""

    cell: Cell
    max_abs_dlogp: float | None
    num_tokens: int
    error: str | None

    @property
    def exact(self) -> bool:
        return self.error is None and self.max_abs_dlogp == 0.0 and self.num_tokens >= MIN_TOKENS


def cells(reduced: bool) -> list[Cell]:
    """All layouts in block FP8 and all formats at TP 1; reduced: one cell per model, all of them different."""
    if reduced:
        return [
            Cell("Llama", "PP 2", "FP8 128x128, pow2 scales"),
            Cell("Qwen2.5", "TP 2, engine TP 2", BLOCK_FP8),
            Cell("Qwen3", "DP 2", "FP8 per row"),
            Cell("Qwen3-MoE", "EP 2", BLOCK_FP8),
        ]
    made: list[Cell] = []
    for model in MODELS:
        layouts = MOE_LAYOUTS if Cell(model, "", "").is_moe else DENSE_LAYOUTS
        kept = layouts if model in ("Qwen3", "Qwen3-MoE") else ("TP 1", "TP 2 + SP, PP 2", "TP 1, engine TP 2")
        made += [Cell(model, layout, BLOCK_FP8) for layout in kept]
        made += [Cell(model, "TP 1", fmt) for fmt in FORMATS if fmt != BLOCK_FP8]
    made += [Cell("Qwen3", "TP 2, engine TP 2", "FP8 128x128, pow2 scales")]
    return made


def gpu_cells(backend: str, num_gpus: int) -> list[Cell]:
    """What a GPU backend can compute of the whole matrix with this many GPUs."""
    return [
        replace(cell, backend=backend)
        for cell in cells(reduced=False)
        if cell.num_gpus <= num_gpus and FORMATS[cell.format].get("granularity", "block") == "block"
    ]


def run(cell: Cell, folder: Path, timeout_s: float = 900.0) -> Result:
    """Run one cell in `folder`; its output is kept there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(cell.config(), sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "jetrl_megatron.cli", "train", str(config), "--run-dir", str(folder / "run")]
    with open(folder / "output.log", "wb") as log:
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=timeout_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    run_dir = folder / "run"
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    largest = max((row["mismatch/max_abs_dlogp"] for row in rows), default=None)
    error = None if code == 0 else f"exit code {code}; see {folder / 'output.log'}"
    return Result(cell, largest, sum(int(row["mismatch/num_tokens"]) for row in rows), error)


def matrix(out: Path, wanted: Sequence[Cell]) -> Iterator[Result]:
    """Run these cells, one after the other; TABLE and exactness.md in `out` are written again after each. Cells that
    TABLE already holds as exact are not run again: an interrupted matrix goes on."""
    table = out / TABLE
    rows = json.loads(table.read_text()) if table.is_file() else []
    done = {result.cell: result for result in map(_from_dict, rows) if result.exact}
    for number, cell in enumerate(wanted):
        if cell not in done:
            done[cell] = run(cell, out / f"{number:02d}")
        results = [done[c] for c in wanted if c in done]
        write_atomic(out / "exactness.md", markdown(results))
        write_atomic(table, json.dumps([_as_dict(r) for r in results], indent=2) + "\n")
        yield done[cell]


def markdown(results: list[Result]) -> str:
    """The table for the README."""
    lines = ["| model | format | layout | tokens | max abs dlogp |", "|---|---|---|---|---|"]
    for result in results:
        value = result.error or f"{result.max_abs_dlogp:g}"
        cell = result.cell
        lines.append(f"| {cell.model} | {cell.format} | {cell.layout} | {result.num_tokens:,} | {value} |")
    return "\n".join(lines) + "\n"


def _as_dict(result: Result) -> dict[str, Any]:
    return {**vars(result.cell), **{k: v for k, v in vars(result).items() if k != "cell"}, "exact": result.exact}


def _from_dict(row: dict[str, Any]) -> Result:
    cell = Cell(row["model"], row["layout"], row["format"], row.get("backend", EMULATED))
    return Result(cell, row["max_abs_dlogp"], row["num_tokens"], row["error"])
