"""Megatron-Core trains and SGLang generates on the Triton backend: on a GPU, with CUDA graphs, where there is one, else
in Triton's interpreter. There too every operator of both sides is the kernel that a GPU would run; only products of
tiles are numpy's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
DIMS = {
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MOE_DIMS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_training_and_rollout_agree_on_the_triton_backend(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str
) -> None:
    """Log-probs of decode (before and after an optimizer step and a weight sync) and of prefill are the training
    forward's, to the last bit; the old weights bring the old log-probs back; every operator of either side ran Triton's
    kernels; the precision flows agree."""
    dims: dict[str, Any] = {**DIMS, **(MOE_DIMS if family == "qwen3_moe" else {})}
    model_dir = tiny_model(tmp_path_factory, family, **dims)
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_backend.py")), str(model_dir), str(tmp_path)],
        env={**os.environ, **interpreter, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt")
    for name in ("decode 0", "decode 1", "prefill"):
        theirs, ours = found[name]
        assert len(ours) >= 12
        assert float((ours - theirs).abs().max()) == 0.0, name
    assert not torch.equal(found["decode 0"][0], found["decode 1"][0])  # the step changed the weights
    assert torch.equal(found["decode 0"][0], found["decode 0 again"])
    assert found["flow"] == []
    for side in ("training", "rollout"):
        kernels = found["kernels"][side]
        assert kernels.pop("embedding") == "stock"
        assert set(kernels.values()) == {"triton"}
        assert len(kernels) >= 8
