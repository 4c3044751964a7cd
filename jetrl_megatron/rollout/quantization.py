"""SGLang quantization methods `jetrl_fp8` and `jetrl_bf16`: our linears behind SGLang's linear layers (experts:
`rollout.experts`).

FP8 weights arrive as bytes with one scale grid per Hugging Face tensor (`X.weight`, `X.weight_scale_inv`); a BF16
tensor is quantized on arrival by the same quantizer. Scales are kept per row, so a shard may cut blocks.
The method's parameters travel in the model's config.json under `quantization_config`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear, get_group_rank_size
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from jetrl_megatron import ops
from jetrl_megatron.fp8 import (
    BLOCK,
    E4M3,
    Fp8Format,
    Fp8Recipe,
    Fp8Tensor,
    Fp8Weight,
    GridSlice,
    expand_weight_scale,
    quantize_weight,
    whole,
)
from jetrl_megatron.fp8.backends import use_backend
from jetrl_megatron.rollout.collectives import exact_sum, is_rank_0, maximum, row_parallel
from jetrl_megatron.rollout.experts import Bf16ExpertsMethod, ExpertsMethod, Fp8ExpertsMethod, RouterMethod
from jetrl_megatron.rollout.prepared import exact_weight
from jetrl_megatron.rollout.weight_loader import WeightSyncError

_PART_OF_SHARD = {"q": 0, "k": 1, "v": 2, None: 0}


class JetrlConfig(QuantizationConfig):
    """Parameters of our methods. fmt: FP8 format; tp_invariant: row-parallel sums in the fixed segment tree;
    shard_local: a shard of K that cuts a 1x128 group has a grid of its own, and its weight arrives in BF16."""

    name = "jetrl_fp8"
    method: type[LinearMethodBase]
    experts_method: type[ExpertsMethod]

    def __init__(self, fmt: Fp8Format, tp_invariant: bool, shard_local: bool = False) -> None:
        super().__init__()
        self.fmt, self.tp_invariant, self.shard_local = fmt, tp_invariant, shard_local

    def get_name(self) -> str:
        return self.name

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetrlConfig:
        """Also selects the FP8 backend of this engine process: the one that training resolved."""
        use_backend(config.get("backend", "emulated"))
        fmt = Fp8Format(config["granularity"], config["scale_format"])
        return cls(fmt, bool(config["tp_invariant"]), bool(config.get("shard_local", False)))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, FusedMoE):
            return self.experts_method(self)
        return self.method(self) if isinstance(layer, LinearBase) else None  # type: ignore[call-arg]

    def get_scaled_act_names(self) -> list[str]:
        return []


class Fp8LinearMethod(LinearMethodBase):
    """Linear over FP8 bytes. layer.weight [N, K] E4M3; layer.weight_scale_inv [N, ceil(K/128)] fp32."""

    def __init__(self, config: JetrlConfig) -> None:
        self.config = config
        self.recipe = Fp8Recipe(config.fmt)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_unused: Any,
    ) -> None:
        layer.jetrl_shard_local = input_size != input_size_per_partition and input_size_per_partition % BLOCK != 0
        if layer.jetrl_shard_local and (self.config.tp_invariant or not self.config.shard_local):
            raise ValueError(
                f"rollout.tensor_parallel: {input_size // input_size_per_partition}; rule: K={input_size} per rank is "
                f"a multiple of {BLOCK}; "
                "fix: a smaller engine tensor-parallel size, or precision.misaligned=shard_local"
            )
        layer.jetrl_parts = list(output_partition_sizes)
        layer.jetrl_expected = {(i, what) for i in range(len(layer.jetrl_parts)) for what in ("weight", "scale")}
        layer.jetrl_loaded = set()
        num_rows, num_groups = sum(output_partition_sizes), -(-input_size_per_partition // BLOCK)
        weight = nn.Parameter(torch.zeros(num_rows, input_size_per_partition, dtype=E4M3), requires_grad=False)
        scale = nn.Parameter(torch.ones(num_rows, num_groups, dtype=torch.float32), requires_grad=False)
        weight.weight_loader = partial(self._load_weight, layer)  # type: ignore[attr-defined]
        scale.weight_loader = partial(self._load_scale, layer)  # type: ignore[attr-defined]
        layer.register_parameter("weight", weight)
        layer.register_parameter("weight_scale_inv", scale)

    def _load_weight(self, layer: Any, param: Tensor, loaded: Tensor, shard_id: Any = None) -> None:
        """loaded: the whole Hugging Face tensor [N, K], E4M3 bytes or BF16 to be quantized here."""
        if layer.jetrl_shard_local:
            quantized = quantize_weight(_columns(layer, loaded, param.shape[1]).contiguous(), self.config.fmt)
            param.data.view(torch.uint8).copy_(quantized.data.view(torch.uint8))
            layer.weight_scale_inv.data.copy_(quantized.scale)
            layer.jetrl_loaded |= {(0, "weight"), (0, "scale")}
            return
        if loaded.dtype != E4M3:
            quantized = quantize_weight(loaded, self.config.fmt)
            self._copy(layer, layer.weight_scale_inv, quantized.scale, shard_id, "scale")
            loaded = quantized.data
        self._copy(layer, param, loaded, shard_id, "weight")

    def _load_scale(self, layer: Any, param: Tensor, loaded: Tensor, shard_id: Any = None) -> None:
        """loaded: the tensor's block grid [ceil(N/128), ceil(K/128)], or already one row per weight row."""
        num_rows = layer.jetrl_parts[_part(shard_id)] * _shard_of(layer, shard_id)[1]
        rows = loaded if loaded.shape[0] == num_rows else expand_weight_scale(loaded, num_rows)
        self._copy(layer, param, rows, shard_id, "scale")

    def _copy(self, layer: Any, param: Tensor, whole_tensor: Tensor, shard_id: Any, what: str) -> None:
        """Copy this rank's rows and columns of weight [N, K] or scale [N, ceil(K/128)]."""
        part = _part(shard_id)
        count, first = layer.jetrl_parts[part], sum(layer.jetrl_parts[:part])
        if isinstance(layer, RowParallelLinear):
            source = _columns(layer, whole_tensor, param.shape[1])
        else:
            rank, size = _shard_of(layer, shard_id)
            if whole_tensor.shape[0] != count * size:
                raise WeightSyncError(f"{tuple(whole_tensor.shape)} rows for {size} shards of {count} rows")
            source = whole_tensor[rank * count : (rank + 1) * count]
        target = param.data[first : first + count]
        if target.shape != source.shape:
            raise WeightSyncError(f"shape {tuple(source.shape)} for a parameter of {tuple(target.shape)}")
        target.view(torch.uint8).copy_(source.contiguous().view(torch.uint8))
        layer.jetrl_loaded.add((part, what))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weight; later versions are written into the same memory, which captured CUDA graphs read."""
        if "jetrl_weight" in layer.__dict__:
            layer.jetrl_weight.refresh()
            return
        tensor = Fp8Tensor(layer.weight.data, layer.weight_scale_inv.data, self.config.fmt)
        layer.jetrl_weight = Fp8Weight.of(tensor, _slices(layer))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if isinstance(layer, RowParallelLinear):
            y = self._row_parallel(layer, x)
        else:
            y = ops.fp8_linear(x, layer.weight, layer.jetrl_weight, self.recipe)
        return y if bias is None else ops.bias_add(y, bias)

    def _row_parallel(self, layer: Any, x: Tensor) -> Tensor:
        _, size = get_group_rank_size(layer.tp_group)
        segments, reduce = row_parallel(layer.input_size, size, self.config.tp_invariant)
        return ops.fp8_linear(x, layer.weight, layer.jetrl_weight, self.recipe, segments, reduce)


class Bf16LinearMethod(UnquantizedLinearMethod):
    """Exact BF16 linear; stock weights and loader."""

    def __init__(self, config: JetrlConfig) -> None:
        super().__init__()

    def process_weights_after_loading(self, layer: Any) -> None:
        """Stock packing would replace the parameter; nothing to do here."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        across = isinstance(layer, RowParallelLinear) and get_group_rank_size(layer.tp_group)[1] > 1
        weight = exact_weight(layer, maximum if across else None)
        if across:
            y = ops.row_parallel_linear(x, layer.weight, weight, maximum, exact_sum)
            if not is_rank_0():
                y = torch.zeros_like(y)
        else:
            y = ops.linear(x, layer.weight, weight)
        return y if bias is None else ops.bias_add(y, bias)


class Fp8Config(JetrlConfig):
    name = "jetrl_fp8"
    method = Fp8LinearMethod
    experts_method = Fp8ExpertsMethod


class Bf16Config(JetrlConfig):
    name = "jetrl_bf16"
    method = Bf16LinearMethod
    experts_method = Bf16ExpertsMethod


METHOD_CONFIGS: dict[str, type[JetrlConfig]] = {"jetrl_fp8": Fp8Config, "jetrl_bf16": Bf16Config}


def require_our_methods(model: nn.Module) -> None:
    """Raises RuntimeError naming every linear, router or group of experts that does not use our method."""
    ours = (Fp8LinearMethod, Bf16LinearMethod, RouterMethod, Fp8ExpertsMethod, Bf16ExpertsMethod)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LinearBase | FusedMoE)}
    foreign = [f"{n} ({type(m.quant_method).__name__})" for n, m in layers.items() if type(m.quant_method) not in ours]
    if foreign or not layers:
        raise RuntimeError(f"layers without the jetrl method: {', '.join(foreign) or 'all'}; fix: check quantization")


def carry_formats(model: nn.Module) -> None:
    """Tell norms and activations in front of FP8 linears the format in which these read."""
    modules = dict(model.named_modules())
    for name, linear in modules.items():
        method = getattr(linear, "quant_method", None)
        layer, _, path = name.partition(".self_attn.") if ".self_attn." in name else name.partition(".mlp.")
        in_front = {
            "qkv_proj": f"{layer}.input_layernorm",
            "gate_up_proj": f"{layer}.post_attention_layernorm",
            "down_proj": f"{layer}.mlp.act_fn",
        }.get(path)
        if in_front is not None and isinstance(method, Fp8LinearMethod):
            modules[in_front].jetrl_format = method.config.fmt  # type: ignore[assignment]


def _columns(layer: Any, whole_tensor: Tensor, width: int) -> Tensor:
    """This rank's columns [N, width] of a row-parallel tensor [N, size * width]."""
    rank, size = get_group_rank_size(layer.tp_group)
    return whole_tensor[:, rank * width : (rank + 1) * width] if size > 1 else whole_tensor


def _slices(layer: Any) -> list[GridSlice]:
    """Where this rank's rows lie on the grids of their Hugging Face tensors."""
    if isinstance(layer, RowParallelLinear):
        return whole(layer.weight.shape[0])
    ids = "qkv" if isinstance(layer, QKVParallelLinear) else range(len(layer.jetrl_parts))
    slices, first = [], 0
    for shard_id, count in zip(ids, layer.jetrl_parts, strict=True):
        rank, size = _shard_of(layer, shard_id)
        slices.append(GridSlice(torch.arange(first, first + count), rank * count, size * count))
        first += count
    return slices


def _part(shard_id: Any) -> int:
    return int(_PART_OF_SHARD.get(shard_id, shard_id))


def _shard_of(layer: Any, shard_id: Any) -> tuple[int, int]:
    """(which shard of the Hugging Face tensor this rank holds, number of shards); kv heads may be replicated."""
    if isinstance(layer, QKVParallelLinear) and shard_id in ("k", "v"):
        rank, size = get_group_rank_size(layer.kv_tp_group)
        return rank // layer.num_kv_head_replicas, size // layer.num_kv_head_replicas
    rank, size = get_group_rank_size(layer.tp_group)
    return int(rank), int(size)
