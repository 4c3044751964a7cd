"""What `jetrl plan` computes from dims against the bytes of real Megatron-Core and SGLang objects."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from jetrl_megatron import ops
from jetrl_megatron.config import ModelDims, RunConfig
from jetrl_megatron.config.capacity.activations import LOGITS_COPIES, layer_bytes_per_token, layers_bytes
from jetrl_megatron.config.capacity.layout import Layout
from jetrl_megatron.config.capacity.memory import training_state
from jetrl_megatron.config.capacity.placement import EnginePlace, Placement
from jetrl_megatron.config.capacity.weights import kv_bytes_per_token
from jetrl_megatron.config.schema import OptimizerConfig, ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe
from jetrl_megatron.megatron.linear import LinearPrecision
from jetrl_megatron.megatron.model import Policy
from jetrl_megatron.megatron.optimizer import Trainable, make_trainable
from jetrl_megatron.rollout.environment import engine_environment
from tests.support.launch import join_alone
from tests.support.models import FAMILIES
from tests.support.policies import calm_model, load_policy, micro_batches, sequences, weighted_loss
from tests.support.trainer import one_rank

ROOT = Path(__file__).parents[2]
ALONE = Layout(
    gpus=1,
    nodes=1,
    tensor=1,
    pipeline=1,
    virtual_pipeline=1,
    data=1,
    expert=1,
    sequence=False,
    engine_tensor=1,
    engine_expert=1,
    num_engines=1,
    placement=Placement(shared=True, engines=(EnginePlace(0, 0),)),
)


@pytest.fixture(scope="module", params=[(f, p) for f in FAMILIES for p in ("fp8", "bf16")], ids=str)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainable, str, int]:
    """(policy and optimizer after one update, precision, bytes that autograd kept of the micro-batch's layers)."""
    family, precision = request.param
    join_alone()
    # widths that are no multiples of 128: ragged blocks in K, and for DGrad in the parts of fused weights
    path = calm_model(tmp_path_factory.mktemp(family), family, seed=3, vocab_size=509, intermediate_size=448)
    linear = LinearPrecision(precision == "fp8", Fp8Recipe())
    policy = load_policy(path, one_rank(), ParallelConfig(), linear)
    trainable = make_trainable(policy, OptimizerConfig(lr=1e-3), 10)
    saved = _saved_bytes(trainable)
    trainable.apply()
    for rule, _, module in policy.named_rules():
        if rule.quantized and precision == "fp8":
            assert module.fp8_weight().dgrad  # the version after the update, with what DGrad reads
    return trainable, precision, saved


def _batch(policy: Policy) -> Any:
    return micro_batches(sequences(policy.dims.vocab_size)[:2], 1, 1.0, 1, equal=False)


def _saved_bytes(trainable: Trainable) -> int:
    """Distinct storages that autograd keeps of the layers when the forward is done; parameters and what embedding,
    final norm, lm_head and log-probs keep are left out."""
    policy = trainable.policy
    parameters = {p.untyped_storage().data_ptr() for model in policy.models for p in model.parameters()}
    storages: dict[int, Tensor] = {}
    at_loss: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    base = weighted_loss(10)

    def loss(logprobs: Tensor, batch: Any) -> Any:
        at_loss.update(storages)  # before the loss's own operators, and before backward makes graphs of its own
        return base(logprobs, batch)

    (batch,) = _batch(policy)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainable.accumulate([batch], loss)
    total = sum(t.untyped_storage().nbytes() for ptr, t in at_loss.items() if ptr not in parameters)
    rows, hidden, vocab = len(batch.request.rows), policy.dims.hidden_size, policy.dims.vocab_size
    ids, rows_index, final_norm = 8 * batch.num_tokens, 8 * rows, 2 * hidden * batch.num_tokens
    return total - ids - rows_index - final_norm - rows * (2 * hidden + 4 * vocab)


def _config(precision: str) -> RunConfig:
    section = {"train": precision, "rollout": precision, "backend": "emulated"}
    return RunConfig.model_validate({"model": {"path": "x"}, "data": {"path": "x"}, "precision": section})


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def test_state_bytes_are_those_of_megatron(trained: tuple[Trainable, str, int]) -> None:
    """Weights, FP8 copies, fp32 main grads, fp32 masters and Adam moments: planned bytes == real bytes, exactly."""
    trainable, precision, _ = trained
    policy = trainable.policy
    planned = training_state(_config(precision), policy.dims, ALONE, 0)
    parameters = [p for model in policy.models for p in model.parameters()]
    assert planned["weights bf16"] == _nbytes(*parameters)
    assert planned["main grads fp32"] == _nbytes(*(p.main_grad for p in parameters))  # type: ignore[attr-defined]
    buffers = [buffer for ddp in trainable.ddp for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]]
    assert planned["main grads fp32"] == sum(_nbytes(buffer.grad_data) for buffer in buffers)
    states = list(_adam_states(trainable.optimizer))
    assert planned["masters fp32"] == _nbytes(*(master for master, _ in states))
    moments = [state[key] for _, state in states for key in ("exp_avg", "exp_avg_sq")]
    assert planned["Adam moments fp32"] == _nbytes(*moments)
    fp8 = [module.fp8_weight() for rule, _, module in policy.named_rules() if rule.quantized and precision == "fp8"]
    forward = sum(_nbytes(w.quantized.data, w.quantized.scale, w.fprop.scale) for w in fp8)
    assert all(w.fprop.codes.data_ptr() == w.quantized.data.data_ptr() for w in fp8)  # one copy of the codes
    assert planned["weights fp8"] == forward + sum(_nbytes(w.dgrad.codes, w.dgrad.scale) for w in fp8)


def _adam_states(optimizer: Any) -> Any:
    """(fp32 master, its state) of every parameter, dense and expert."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                yield master, part.optimizer.state[master]


def test_saved_activations_are_those_of_autograd(trained: tuple[Trainable, str, int]) -> None:
    """Bytes that the layers keep for backward, counted by autograd's hooks over distinct storages, exactly. The rope
    tables that closures hold are planned, but no hook sees them. MoE: the tokens' experts differ in number, their sum
    does not."""
    trainable, precision, saved = trained
    dims = trainable.policy.dims
    (batch,) = _batch(trainable.policy)
    planned = layers_bytes(dims, ALONE, _config(precision).precision, batch.num_tokens, recompute=False)
    rope_tables = dims.num_layers * batch.num_tokens * 2 * 2 * 4 * (dims.head_dim // 2)
    assert planned - rope_tables == saved


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_recompute_keeps_the_inputs_of_the_layers(family: str, tmp_path: Path) -> None:
    """With full recompute autograd keeps one bf16 [T, H] per layer and nothing else of the layers, exactly."""
    join_alone()
    path = calm_model(tmp_path, family, seed=3, vocab_size=509)
    linear = LinearPrecision(True, Fp8Recipe())
    policy = load_policy(path, one_rank(), ParallelConfig(), linear, recompute=True)
    trainable = make_trainable(policy, OptimizerConfig(lr=1e-3), 10)
    saved = _saved_bytes(trainable)
    dims, precision, tokens = policy.dims, _config("fp8").precision, _batch(policy)[0].num_tokens
    one_layer = tokens * sum(layer_bytes_per_token(dims, ALONE, precision).values())
    assert layers_bytes(dims, ALONE, precision, tokens, recompute=True) - one_layer == saved


def test_logits_peak_is_that_of_the_allocator() -> None:
    """Peak of lm_head, log-prob and their backward, from the allocator's own events: LOGITS_COPIES times the fp32
    logits, within 1 %."""
    rows, vocab, hidden = 256, 20000, 64
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(vocab, hidden, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(vocab, hidden)  # type: ignore[attr-defined]
    prepared, targets = ops.ExactWeight.of(weight), torch.randint(0, vocab, (rows,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        logits = ops.lm_head(x, weight, prepared)
        logprobs = ops.logprob(logits, targets, 1.0)
        del logits
        logprobs.sum().backward()
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    assert max(held) == pytest.approx(LOGITS_COPIES * 4 * rows * vocab, rel=0.01)


POOL = """
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
pool = MHATokenToKVPool(size=63, page_size=1, dtype=torch.bfloat16, head_num={heads}, head_dim={head_dim},
                        layer_num={layers}, device="cpu", enable_memory_saver=False)
print(sum(buffer.nbytes for buffer in [*pool.k_buffer, *pool.v_buffer]))
"""


@pytest.mark.slow
def test_kv_bytes_are_those_of_sglang() -> None:
    """SGLang's own KV pool with the dims of Qwen3-0.6B holds `kv_bytes_per_token` per slot (63 slots and a padding
    one), whole and at TP 2."""
    architecture = yaml.safe_load((ROOT / "configs" / "models" / "qwen3-0.6b.yaml").read_text())["model"][
        "architecture"
    ]
    dims = ModelDims.from_hf(architecture)
    for tensor in (1, 2):
        code = POOL.format(heads=8 // tensor, head_dim=128, layers=28)
        environment = engine_environment(1, 1)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        planned = kv_bytes_per_token(dims, replace(ALONE, engine_tensor=tensor))
        assert int(done.stdout.split()[-1]) == 64 * planned
