"""mbridge's own load and save of a checkpoint, as another converter to compare with.

Its functions run as they are: HF files -> Megatron parameters -> HF files, on one rank over gloo. It gets the bare
parameters instead of a GPTModel, whose construction needs Transformer Engine.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from transformers import AutoConfig

from jetrl_megatron.config import ModelDims
from jetrl_megatron.megatron import cpu_shim
from jetrl_megatron.weights.plan import ConversionPlan

FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


class Parameters:
    """What mbridge asks a model for: parameters under Megatron's names."""

    def __init__(self, plan: ConversionPlan) -> None:
        self._held: dict[str, Tensor] = {}
        for rule in plan.rules:
            name = rule.megatron_name
            for ours, theirs in FUSED_NORMS.items():
                name = name.replace(ours, theirs)
            held: Any = torch.empty(rule.megatron_shape(1), dtype=torch.bfloat16)
            held.tensor_model_parallel, held.partition_dim = rule.tp_dim is not None, rule.tp_dim
            self._held[name] = held

    def state_dict(self) -> dict[str, Tensor]:
        return self._held

    def named_parameters(self) -> Any:
        return self._held.items()


def prepare_mbridge() -> Any:
    """Its module `bridge` and class for Qwen3. Here so that the import is not measured."""
    cpu_shim.install()
    from mbridge.core import bridge
    from mbridge.models.qwen3 import Qwen3Bridge

    return bridge, Qwen3Bridge


def mbridge_copy(source: Path, out: Path) -> None:
    """Qwen3 HF folder -> HF folder."""
    core, qwen3 = prepare_mbridge()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        config = json.loads((source / "config.json").read_text())
        bridge = object.__new__(qwen3)
        bridge.hf_config = AutoConfig.from_pretrained(source)
        bridge.config = SimpleNamespace(gated_linear_unit=True)
        bridge.mpu = core.ParallelStates.get_parallel_state()
        bridge.dtype = bridge.make_vocab_size_divisible_by = None
        bridge._weight_name_mapping_mcore_local_to_global = lambda model, **_: {n: n for n in model.state_dict()}
        core.unwrap_model = lambda model: model
        model = Parameters(ConversionPlan(ModelDims.from_hf(config)))
        bridge.load_weights([model], str(source))
        bridge.save_weights([model], str(out))
        dist.destroy_process_group()
