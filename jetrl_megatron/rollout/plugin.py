"""SGLang plugin (entry point group `sglang.srt.plugins`, loaded in every engine process): registers our operators.

Everything SGLang's forward computes for Llama, Qwen2, Qwen3 and Qwen3-MoE models is sent to `ops`: norms, rope,
activation, attention, linears, router and experts, lm_head, log-probs and sampling. SGLang 0.5.23; targets are checked
when hooks are applied.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron import ops
from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.fp8 import Fp8Format
from jetrl_megatron.native.tensors import use_threads
from jetrl_megatron.ops.recorder import recording
from jetrl_megatron.ops.timing import start_operator_times, timing
from jetrl_megatron.rollout.environment import (
    engine_threads,
    is_engine_process,
    operator_times_file,
    precision_flow_folder,
)
from jetrl_megatron.rollout.flow import FlowRecorder
from jetrl_megatron.rollout.prepared import exact_weight
from jetrl_megatron.rollout.sampler import sample_tokens
from jetrl_megatron.rollout.weight_loader import WeightSyncError, last_digest

_GRAPHS = "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
_UPDATER = "model_executor.model_runner_components.weight_updater.WeightUpdater"
METHODS = ("jetrl_fp8", "jetrl_bf16")


def register() -> None:
    """Called by SGLang's `load_plugins` in every process. Does nothing outside engines that this project started, so
    that a stock SGLang in the same environment stays stock."""
    if not is_engine_process():
        return
    from sglang.kernels.fused_op import KernelBackend, set_fused_op_backend
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import quantization
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from jetrl_megatron.rollout.attention import PagedAttentionBackend
    from jetrl_megatron.rollout.quantization import METHOD_CONFIGS

    use_threads(engine_threads())
    set_fused_op_backend(KernelBackend.TORCH)  # on every device the paths that our hooks replace (`forward_native`)
    choices.add_attention_backend_choices(["jetrl"])
    register_attention_backend("jetrl")(PagedAttentionBackend)
    for allowed in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        allowed.append("jetrl")
    choices.add_quantization_method_choices(list(METHODS))
    quantization.QUANTIZATION_METHODS.update(METHOD_CONFIGS)
    _register_operator_hooks()


def _register_operator_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    replace = {
        "layers.layernorm.RMSNorm.forward_native": _rmsnorm,
        "layers.activation.SiluAndMul.forward_native": _silu_and_mul,
        "layers.rotary_embedding.base.RotaryEmbedding.forward_native": _rope,
        "layers.logits_processor.LogitsProcessor._compute_lm_head": _lm_head,
        "layers.sampler.Sampler.forward": _sampler(operator_times_file()),
        "layers.logprob_processor.InputLogprobProcessor.forward": _input_logprobs,
        # What stock SGLang would do with fused kernels on CUDA:
        "models.qwen3_moe.enable_fused_set_kv_buffer": _never,  # write the KV pool in rope
        "layers.dual_gemm.DualGemm._select_mode": _nothing,  # gate_up_proj and its activation in one GEMM
        # Asked for by enable_deterministic_inference, which our seeded sampling needs: other matmuls for all of torch.
        "batch_invariant_ops.enable_batch_invariant_mode": _nothing,
    }
    around: dict[str, Callable[..., Any]] = {
        f"{_UPDATER}.update_weights_from_tensor": _report_sync_error,
        "model_executor.model_runner.ModelRunner.load_model": _check_model,
        f"{_GRAPHS}.can_run_graph": _unless_watched,
        "models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__": _moe_block,
    }
    folder = precision_flow_folder()
    if folder is not None:
        flow = FlowRecorder(folder)
        around["model_executor.model_runner.ModelRunner.forward"] = flow.forward
        around["layers.sampler.Sampler.forward"] = flow.sample
    if not torch.cuda.is_available():
        around["entrypoints.engine._set_envs_and_config"] = _fork_children
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = _pageable  # the buffer of routed experts, which stock SGLang registers with CUDA
        replace["layers.rotary_embedding.base.RotaryEmbedding._compute_inv_freq"] = _cpu_inv_freq
    for target, hook in replace.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.REPLACE)
    for target, hook in around.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _fork_children(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """SGLang's children start as copies of this process, which has imported everything: a third of the start-up time
    on a CPU. (With CUDA they must be spawned, as SGLang does.)"""
    original(*args, **kwargs)
    multiprocessing.set_start_method("fork", force=True)


def _pageable(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, *_unused: Any, **_kw: Any
) -> Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


def _sampler(times_file: Path | None) -> Callable[..., Tensor]:
    """`sample_tokens`, the last thing of every batch; with `times_file`, which then holds the seconds per operator."""
    if times_file is None:
        return sample_tokens
    totals = start_operator_times()

    def sample_and_report(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        ids = sample_tokens(self, *args, **kwargs)
        write_atomic(times_file, json.dumps(totals))
        return ids

    return sample_and_report


def _rmsnorm(
    self: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Any = None, quant_linear: Any = None
) -> Any:
    assert post_residual_addition is None
    if residual is None:
        return ops.rmsnorm(x, self.weight, self.variance_epsilon, _format(self))
    return ops.add_rmsnorm(x, residual, self.weight, self.variance_epsilon, _format(self))


def _silu_and_mul(self: Any, x: Tensor) -> Tensor:
    return ops.swiglu(x, _format(self))


def _format(module: Any) -> Fp8Format | None:
    """Of the FP8 linear that reads this module's result; see `quantization.carry_formats`."""
    return module.__dict__.get("jetrl_format")


def _rope(
    self: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    if not self.is_neox_style or self.rotary_dim != self.head_size or offsets is not None:
        raise NotImplementedError("partial or interleaved rope; rule: the half-split layout over the whole head")
    table = self.__dict__.get("jetrl_table")
    if table is None:
        table = ops.RopeTable(
            float(self.base), self.head_size, int(self.max_position_embeddings), _llama3_scaling(self)
        )
        self.__dict__["jetrl_table"] = table
    positions = positions.flatten()

    def rotate(x: Tensor) -> Tensor:
        return ops.rope(x.reshape(positions.numel(), -1, self.head_size), positions, table).reshape(x.shape)

    return rotate(query), rotate(key)


def _llama3_scaling(rotary: Any) -> dict[str, float] | None:
    if not hasattr(rotary, "low_freq_factor"):
        if type(rotary).__name__ != "RotaryEmbedding":
            raise NotImplementedError(f"rope of type {type(rotary).__name__}: only default and llama3")
        return None
    return {
        "factor": float(rotary.scaling_factor),
        "low_freq_factor": float(rotary.low_freq_factor),
        "high_freq_factor": float(rotary.high_freq_factor),
        "original_max_position_embeddings": float(rotary.orig_max_position),
    }


def _cpu_inv_freq(self: Any, base: float) -> Tensor:
    """SGLang's own cache, unused by `_rope`; the stock function asks for a CUDA device in deterministic mode."""
    return 1.0 / (base ** (torch.arange(0, self.rotary_dim, 2, dtype=torch.float, device="cpu") / self.rotary_dim))


def _lm_head(
    self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None, *, out: Any = None
) -> Tensor:
    """fp32 logits of this rank's vocabulary shard."""
    assert embedding_bias is None
    return ops.lm_head(hidden_states, lm_head.weight, exact_weight(lm_head))


def _input_logprobs(
    self: Any,
    pruned_states: Tensor,
    sample_indices: Tensor,
    input_logprob_indices: Tensor,
    token_to_seq_idx: Any,
    lm_head: Any,
    get_logits_fn: Any,
    logits_metadata: Any,
    skip_chunking_for_dp_attn: bool = False,
) -> tuple[Any, Tensor]:
    """Prompt log-probs (prefill scoring) by our log-softmax; temperature 1."""
    from sglang.srt.layers.logprob_processor import LogprobResult

    if logits_metadata.extend_return_top_logprob or logits_metadata.extend_token_ids_logprob:
        raise NotImplementedError("top or chosen-token prompt log-probs; rule: only the prompt's own tokens")
    logits = get_logits_fn(pruned_states, lm_head, logits_metadata)
    targets = logits_metadata.extend_input_logprob_token_ids_gpu.long()
    scored = ops.logprob(logits[input_logprob_indices].float(), targets, 1.0)
    return LogprobResult(token_logprobs=scored), logits[sample_indices]


def _report_sync_error(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A refused update is an answer, not the end of the engine."""
    try:
        success, message = original(self, *args, **kwargs)
    except WeightSyncError as error:
        return False, str(error)
    return success, last_digest() if success and last_digest() else message


def _unless_watched(original: Callable[..., bool], self: Any, forward_batch: Any) -> bool:
    """A replayed CUDA graph runs none of our operators' Python: nothing could be recorded, nor timed."""
    return not (recording() or timing()) and original(self, forward_batch)


def _moe_block(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from jetrl_megatron.rollout.experts import use_our_router

    original(self, *args, **kwargs)
    use_our_router(self)


def _check_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """After SGLang built the model: refuse to start if a layer that should be ours is not."""
    from jetrl_megatron.rollout.quantization import carry_formats, require_our_methods

    result = original(self, *args, **kwargs)
    if self.server_args.quantization in METHODS:
        require_our_methods(self.model)
        carry_formats(self.model)
    return result
