"""`jetrl precision-flow`, run as a user runs it, on real Megatron-Core and real SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_megatron.ops.precision_flow import Graph, compare
from jetrl_megatron.trainer.flow_picture import RED
from tests.support.runs import QUICKSTART, ROOT, TINY, environment

pytestmark = pytest.mark.slow


def precision_flow(out: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jetrl_megatron.cli", "precision-flow", str(QUICKSTART), "--out", str(out)]
    return subprocess.run(
        [*command, *overrides], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def load(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def test_subgraph(tmp_path: Path) -> None:
    """Two pipeline stages against one engine: exit 0; one training graph with both layers and an FP8 backward."""
    done = precision_flow(tmp_path, "parallel.pipeline=2", "precision.dgrad=fp8", "precision.wgrad=fp8")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rollout is a subgraph" in done.stdout
    assert load(tmp_path, "verdict.json")["subgraph"] is True
    training = Graph.from_json(load(tmp_path, "train.json"))
    rollout = {side: Graph.from_json(graph) for side, graph in load(tmp_path, "rollout.json").items()}
    assert list(rollout) == ["prefill", "decode"]
    assert all(compare(training, graph) == [] for graph in rollout.values())
    modules = list(training.forward())
    assert modules[0] == "model.embed_tokens"
    assert modules.index("model.layers.0.mlp.down_proj") < modules.index("model.layers.1.input_layernorm")
    assert modules[-1] == "lm_head"
    backward = [n for n in training.nodes if n.phase == "backward" and n.operator == "fp8_linear"]
    assert len(backward) == 2 * 4
    for node in backward:
        inside = {edge.tensor: (edge.dtype, edge.granularity) for edge in node.edges_of("internal")}
        assert inside["dy of DGrad"] == inside["x of WGrad"] == ("float8_e4m3fn", "1x128")
        assert inside["weight of DGrad"] == ("float8_e4m3fn", "128x128")
    assert (tmp_path / "flow.svg").read_text().count(RED) == 1


def test_not_a_subgraph(tmp_path: Path) -> None:
    """BF16 training with an FP8 engine: exit 1, the differing edges in words, red in the picture."""
    done = precision_flow(tmp_path, "precision.train=bf16")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    verdict = load(tmp_path, "verdict.json")
    assert verdict["subgraph"] is False
    where = "model.layers.*.mlp.gate_up_proj (layers 0-1)"
    assert f"{where}: the operator is linear in training, fp8_linear in prefill and decode" in verdict["differences"]
    assert all(line in done.stderr for line in verdict["differences"])
    assert all({"module", "operator", "edge", "sides", "found"} == set(d) for d in verdict["details"])
    assert (tmp_path / "flow.svg").read_text().count(RED) > 8


def test_a_run_with_unequal_flows_ends_before_its_first_step(tmp_path: Path) -> None:
    """`jetrl train` refuses what the configuration shows; what only the recording shows ends the run at start-up, with
    the differences. (Launched past the command line's own refusal.)"""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from jetrl_megatron.config import load_config\n"
        "from jetrl_megatron.trainer.launch import launch\n"
        "sys.exit(launch(load_config(sys.argv[1], sys.argv[3:]), Path(sys.argv[2]), 'train'))\n"
    )
    overrides = [*TINY, "model.init=random", "precision.train=bf16"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(QUICKSTART), str(tmp_path), *overrides],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    assert "PrecisionFlowError: rollout is not a subgraph" in done.stderr
    assert "model.layers.*.self_attn.o_proj (layers 0-1)" in done.stderr
    assert load(tmp_path / "precision_flow", "verdict.json")["subgraph"] is False
    assert (tmp_path / "metrics.jsonl").read_text() == ""
