"""The exactness matrix: every cell can start, and the reduced one is exactly 0.0."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jetrl_megatron.cli.placement import nodes_and_ranks
from jetrl_megatron.config import ModelDims, RunConfig, check_model
from jetrl_megatron.config.capacity import place_engines
from jetrl_megatron.study import exactness
from jetrl_megatron.study.exactness import MIN_TOKENS, Cell, Result, cells, gpu_cells, markdown
from tests.support.runs import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("cell", [*cells(reduced=False), *gpu_cells("triton", 8)], ids=str)
def test_every_cell_passes_the_check(cell: Cell) -> None:
    """No cell of the full matrix breaks a rule of `jetrl check`."""
    cfg = RunConfig.model_validate(cell.config())
    assert cfg.model.architecture is not None
    assert check_model(cfg, ModelDims.from_hf(cfg.model.architecture)) == []


def test_cells_of_a_gpu_backend() -> None:
    """One GPU: every family at TP 1 in block formats and BF16; two: the layouts of two ranks too; an engine of two
    ranks beside one of training needs three. Trainer and engines of every cell have their places."""
    layouts = [{c.layout for c in gpu_cells("triton", n)} for n in range(1, 9)]
    assert {(c.model, c.layout) for c in gpu_cells("triton", 1)} >= {(model, "TP 1") for model in exactness.MODELS}
    assert not layouts[0] & {"TP 2", "DP 2", "EP 2", "TP 1, engine TP 2"}
    assert layouts[1] >= {"TP 2 + SP", "DP 2", "EP 2", "TP 2, engine TP 2"}
    assert "TP 1, engine TP 2" in layouts[2] - layouts[1]
    assert "TP 4" in layouts[3] - layouts[2]
    for n in range(1, 9):
        for cell in gpu_cells("triton", n):
            assert (cell.backend, cell.format != "FP8 per row") == ("triton", True)
            cfg = RunConfig.model_validate(cell.config())
            place_engines(cfg.rollout, 1, n, nodes_and_ranks(cfg, {})[1])


def test_what_counts_as_exact() -> None:
    """0.0 over enough tokens of a run that ended well; the table names the others."""
    cell = cells(reduced=True)[0]
    good = Result(cell, 0.0, MIN_TOKENS, None)
    bad = [
        Result(cell, 1e-9, 9999, None),
        Result(cell, 0.0, MIN_TOKENS - 1, None),
        Result(cell, None, 0, "exit code 2"),
        Result(cell, 0.0, 9999, "exit code 1"),
    ]
    assert good.exact
    assert not any(result.exact for result in bad)
    assert markdown([good, *bad]).splitlines()[2:4] == [
        "| Llama | FP8 128x128, pow2 scales | PP 2 | 2,000 | 0 |",
        "| Llama | FP8 128x128, pow2 scales | PP 2 | 9,999 | 1e-09 |",
    ]


def test_an_interrupted_matrix_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact cells of the table are kept, failed ones run again; the table is complete after every cell."""
    ran: list[Cell] = []

    def run(cell: Cell, _folder: Path) -> Result:
        ran.append(cell)
        return Result(cell, 0.0, MIN_TOKENS, None if len(ran) != 2 else "exit code 1")

    monkeypatch.setattr(exactness, "run", run)
    assert [result.exact for result in exactness.matrix(tmp_path, cells(reduced=True))] == [True, False, True, True]
    assert all(result.exact for result in exactness.matrix(tmp_path, cells(reduced=True)))
    assert ran[4:] == [ran[1]]


@pytest.mark.slow
def test_reduced_matrix_is_exact(tmp_path: Path) -> None:
    """Four real runs: each family, four layouts, three formats; max |dlogp| 0.0, before and after a weight update."""
    command = [sys.executable, "-m", "jetrl_megatron.cli", "exactness", "--reduced", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "exactness.json").read_text())
    assert [(row["max_abs_dlogp"], row["exact"]) for row in found] == [(0.0, True)] * 4
