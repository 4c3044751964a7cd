"""The acceptance chain of the central claim, link by link, on real SGLang and real Megatron-Core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_megatron.native import tensors as compiled
from jetrl_megatron.ops.kernels import use_kernels
from jetrl_megatron.ops.precision_flow import Graph, compare, describe
from jetrl_megatron.rollout.engine import EngineRefusedError
from jetrl_megatron.rollout.environment import engine_environment
from jetrl_megatron.rollout.sglang_engine import EnginePool
from jetrl_megatron.trainer.precision_flow import judge
from jetrl_megatron.weights.bundle import MANIFEST, Bundle
from tests.support.engines import (
    engine,
    engine_logprobs,
    prompts,
    publish,
    requests,
    rollout_flow,
    trainer_logprobs,
    training_flow,
)
from tests.support.models import tiny_model
from tests.support.trainer import load_policy

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "llama-tied-llama3rope-cut-blocks": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
            "hidden_size": 192,
            "head_dim": 64,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 320,
        },
    ),
    "qwen2-bias": ("qwen2", {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory, "qwen3")


@pytest.fixture(scope="module")
def policy(qwen3: Path) -> Any:
    return load_policy(qwen3, fp8=True)


@pytest.fixture(scope="module")
def pool(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    with engine(qwen3, tmp_path_factory.mktemp("engine")) as started:
        yield started


@pytest.fixture
def loaded(pool: EnginePool, policy: Any, tmp_path: Path) -> EnginePool:
    pool.load_weights(publish(policy, tmp_path, version=0))
    return pool


def test_link_a_b_bytes_and_linears(qwen3: Path, policy: Any, tmp_path: Path) -> None:
    """(a) SGLang's layers hold the trainer's FP8 bytes and scales; (b) its linears give the trainer's outputs, bit for
    bit; and a linear without our method is refused by name, and named in the precision-flow graph."""
    bundle = publish(policy, tmp_path, version=0)
    hidden = policy.dims.hidden_size
    x = torch.randn(37, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.save(x, tmp_path / "x.pt")
    config = json.loads((qwen3 / "config.json").read_text())
    quantization = {
        "quant_method": "jetrl_fp8",
        "granularity": "block",
        "scale_format": "fp32",
        "tp_invariant": True,
    }
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    script = Path(__file__).with_name("in_process.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model_dir), str(bundle.path), str(tmp_path)],
        env={
            **engine_environment(1, 1),
            "PYTHONPATH": os.pathsep.join([engine_environment(1, 1)["PYTHONPATH"], str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    expected = dict(bundle.tensors())
    assert found["tensors"].keys() == expected.keys()
    for name, tensor in found["tensors"].items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    layer = policy.models[0].decoder.layers[0]
    fused = layer.self_attention.linear_qkv(x.unsqueeze(1))[0].squeeze(1).detach()
    rule = policy.plan.rule_for("decoder.layers.0.self_attention.linear_qkv.weight")
    hf_order = torch.cat([segment.local_rows for segment in rule.local_segments(1, 0)])
    ours = fused[:, hf_order]
    assert torch.equal(found["qkv"], ours)
    gate_up = layer.mlp.linear_fc1(x.unsqueeze(1))[0].squeeze(1).detach()
    assert torch.equal(found["gate_up"], gate_up)
    assert "layers.0.self_attn.qkv_proj" in found["refusal"]
    modules = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj")
    training = training_flow(policy)[0]
    training = replace(training, nodes=tuple(n for n in training.nodes if n.module in modules))
    lines = describe(compare(training, Graph.of("prefill", found["nodes"])))
    where = "model.layers.*.self_attn.qkv_proj (layers 0)"
    assert f"{where}: the operator is fp8_linear in training, stock QKVParallelLinear in prefill" in lines
    assert all(line.startswith(where) for line in lines)  # o_proj is ours


def test_link_c_prefill_scores_equal_training_logprobs(loaded: EnginePool, policy: Any) -> None:
    """(c) SGLang's prefill log-probs of whole sequences are the training forward's."""
    from jetrl_megatron.megatron.step import compute_logprobs, pack

    sequences = prompts(policy.dims.vocab_size, count=8, longest=200, seed=3)
    scores = loaded.score(sequences)
    ours = compute_logprobs(policy, [pack([(ids, 1)], 1.0, pad_multiple=1) for ids in sequences])
    for score, logprobs in zip(scores, ours, strict=True):
        assert torch.equal(torch.tensor(score, dtype=torch.float32), logprobs)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9), (0.0, 1.0)])
def test_link_c_d_generation_equals_training(loaded: EnginePool, policy: Any, temperature: float, top_p: float) -> None:
    """Log-probs reported while decoding are the training forward's: chunked prefill, prefix hits, any temperature."""
    ids = prompts(policy.dims.vocab_size, count=24, longest=150)
    completions = loaded.generate(requests(ids, temperature, top_p))
    ours, theirs = trainer_logprobs(policy, ids, completions, temperature), engine_logprobs(completions)
    assert len(ours) > 500
    assert float((ours - theirs).abs().max()) == 0.0


def test_trainer_in_torch_form_equals_engine_in_compiled_form(
    loaded: EnginePool, qwen3: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two sides need not run the same kernel set: the torch forms in training give the compiled engine's bits."""
    ids = prompts(policy.dims.vocab_size, count=12, longest=100, seed=8)
    completions = loaded.generate(requests(ids, temperature=0.8))
    monkeypatch.setattr(compiled, "usable", lambda *_tensors: False)
    use_kernels("reference")
    try:
        ours = trainer_logprobs(load_policy(qwen3, fp8=True), ids, completions, 0.8)
    finally:
        use_kernels(None)
    assert len(ours) > 300
    assert float((ours - engine_logprobs(completions)).abs().max()) == 0.0


def test_link_d_batch_composition_changes_nothing(loaded: EnginePool, policy: Any) -> None:
    """(d) A request gives the same tokens and log-probs alone, in a batch, and again from a warm prefix cache."""
    asked = requests(prompts(policy.dims.vocab_size, count=12, longest=150, seed=5), temperature=1.0)
    together = loaded.generate(asked)
    alone = [loaded.generate([request])[0] for request in asked[:4]]
    again = loaded.generate(list(reversed(asked)))[::-1]
    assert [c.token_ids for c in together[:4]] == [c.token_ids for c in alone]
    assert [c.logprobs for c in together[:4]] == [c.logprobs for c in alone]
    assert [(c.token_ids, c.logprobs) for c in together] == [(c.token_ids, c.logprobs) for c in again]
    assert len({tuple(c.token_ids) for c in together}) == len(together)


def test_link_e_sync_a_b_a_restores(pool: EnginePool, qwen3: Path, tmp_path: Path) -> None:
    """(e) Every sync ends with equal digests, B changes the outputs, and A again restores them bit for bit."""
    policy = load_policy(qwen3, fp8=True)
    asked = requests(prompts(policy.dims.vocab_size, count=6, longest=60, seed=7), temperature=1.0)
    first = publish(policy, tmp_path, version=1)
    pool.load_weights(first)
    before = pool.generate(asked)
    with torch.no_grad():
        for _, parameter, _ in policy.named_rules():
            parameter.mul_(1.0625)
    policy.weights_changed(2)
    second = publish(policy, tmp_path, version=2)
    assert second.digest != first.digest
    pool.load_weights(second)
    changed = pool.generate(asked)
    assert (
        float(
            (trainer_logprobs(policy, [r.token_ids for r in asked], changed, 1.0) - engine_logprobs(changed))
            .abs()
            .max()
        )
        == 0.0
    )
    pool.load_weights(first)
    after = pool.generate(asked)
    assert [c.logprobs for c in changed] != [c.logprobs for c in before]
    assert [(c.token_ids, c.logprobs) for c in after] == [(c.token_ids, c.logprobs) for c in before]


def test_refused_bundle_leaves_the_old_version_whole(loaded: EnginePool, policy: Any, tmp_path: Path) -> None:
    """A bundle with a flipped byte, a missing tensor or a wrong shape is refused by name; outputs stay the same."""
    asked = requests(prompts(policy.dims.vocab_size, count=3, longest=40, seed=9), temperature=1.0)
    before = loaded.generate(asked)
    name = "model.layers.0.mlp.down_proj.weight"

    good = publish(policy, tmp_path / "flip", version=5)
    damaged = {**json.loads((good.path / MANIFEST).read_text())}
    damaged["checksums"][name] = "0" * 32
    (good.path / MANIFEST).write_text(json.dumps(damaged))
    with pytest.raises(EngineRefusedError, match=name):
        loaded.load_weights(Bundle.open(good.path))

    from jetrl_megatron.megatron.gather import export_fp8
    from jetrl_megatron.weights.bundle import write_bundle

    partial = ((n, t) for n, t in export_fp8(policy) if n != name)
    with pytest.raises(EngineRefusedError, match="missing"):
        loaded.load_weights(write_bundle(tmp_path / "partial", 6, partial, 1 << 20))
    cut = ((n, t[:-1] if n == name else t) for n, t in export_fp8(policy))
    with pytest.raises(EngineRefusedError, match="shape"):
        loaded.load_weights(write_bundle(tmp_path / "cut", 7, cut, 1 << 20))
    assert [(c.token_ids, c.logprobs) for c in loaded.generate(asked)] == [(c.token_ids, c.logprobs) for c in before]


def test_dead_engine_is_restarted_with_the_current_weights(loaded: EnginePool, policy: Any) -> None:
    """SIGKILL of the scheduler after it took some of the work: the pool starts a new engine, loads the current version
    and returns the tokens that the old one would have."""
    import threading
    import time

    import psutil

    asked = requests(
        prompts(policy.dims.vocab_size, count=16, longest=100, seed=11), temperature=1.0, max_new_tokens=120
    )
    expected = loaded.generate(asked)
    pids = loaded.engines[0].child_pids()
    scheduler = next(p for p in map(psutil.Process, pids) if "scheduler" in " ".join(p.cmdline()))
    idle = scheduler.cpu_times().user

    def kill_at_work() -> None:
        """Prefill alone takes longer than this on any machine; decoding all of it takes many times as long."""
        deadline = time.monotonic() + 60
        while scheduler.cpu_times().user < idle + 0.1 and time.monotonic() < deadline:
            time.sleep(0.001)
        scheduler.kill()

    killer = threading.Thread(target=kill_at_work)
    killer.start()
    found = loaded.generate(asked)
    killer.join()
    assert loaded.num_restarts == 1
    assert [(c.token_ids, c.logprobs) for c in found] == [(c.token_ids, c.logprobs) for c in expected]


@pytest.mark.parametrize(
    ("variant", "precision"),
    [(v, p) for v in VARIANTS for p in ("fp8", "bf16") if (v, p) != ("qwen3", "fp8")],  # that one: the tests above
)
def test_families_are_exact(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, variant: str, precision: str
) -> None:
    """Generation equals training exactly for every family: biases, tied embeddings, llama3 rope, head_dim 64, widths
    that are not multiples of 128; with FP8 and with exact BF16 linears. (f) The recorded rollout graph is part of the
    recorded training graph."""
    family, dims = VARIANTS[variant]
    model_dir = tiny_model(tmp_path_factory, family, **dims)
    fp8 = precision == "fp8"
    policy = load_policy(model_dir, fp8)
    ids = prompts(policy.dims.vocab_size, count=16, longest=100)
    with engine(model_dir, tmp_path / "engine", precision) as pool:
        pool.load_weights(publish(policy, tmp_path, version=0, fp8=fp8))
        completions = pool.generate(requests(ids, temperature=0.8))
        assert describe(judge(training_flow(policy), rollout_flow(pool))) == []  # link (f)
    difference = trainer_logprobs(policy, ids, completions, 0.8) - engine_logprobs(completions)
    assert len(difference) > 300
    assert float(difference.abs().max()) == 0.0


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_engine_tensor_parallel_is_exact(qwen3: Path, tmp_path: Path, precision: str) -> None:
    """Two SGLang ranks against training on one: fp32 partial sums meet in the fixed tree, log-probs are equal, and each
    rank records the graph of the one training rank."""
    fp8 = precision == "fp8"
    policy = load_policy(qwen3, fp8)
    ids = prompts(policy.dims.vocab_size, count=12, longest=100)
    with engine(qwen3, tmp_path / "engine", precision, tensor_parallel=2) as pool:
        pool.load_weights(publish(policy, tmp_path, version=0, fp8=fp8))
        completions = pool.generate(requests(ids, temperature=0.8))
        assert describe(judge(training_flow(policy), rollout_flow(pool))) == []  # link (f)
    difference = trainer_logprobs(policy, ids, completions, 0.8) - engine_logprobs(completions)
    assert len(difference) > 300
    assert float(difference.abs().max()) == 0.0
