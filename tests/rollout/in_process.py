"""SGLang's model runner inside one process (no engine): loads a bundle and writes what its layers hold and compute.

Arguments: model folder, bundle folder, output folder with x.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    model_dir, bundle_dir, out = map(Path, sys.argv[1:4])
    model = _load_model(model_dir)

    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from jetrl_megatron.ops.recorder import attach, record
    from jetrl_megatron.rollout.flow import canonical_name
    from jetrl_megatron.rollout.quantization import require_our_methods
    from jetrl_megatron.rollout.weight_loader import encode_path, held_tensors, load_bundle
    from jetrl_megatron.weights.bundle import Bundle

    load_bundle(model, [("bundle", encode_path(bundle_dir))])
    for module in model.modules():
        if hasattr(module, "jetrl_parts"):
            module.quant_method.process_weights_after_loading(module)
    x = torch.load(out / "x.pt")
    layer = model.model.layers[0]
    found = {
        "tensors": {name: tensor.clone() for name, tensor in held_tensors(model, Bundle.open(bundle_dir))},
        "qkv": layer.self_attn.qkv_proj(x)[0],
        "gate_up": layer.mlp.gate_up_proj(x)[0],
        "refusal": "",
        "nodes": [],
    }
    stock = layer.self_attn.qkv_proj
    stock.quant_method = UnquantizedLinearMethod()
    stock.weight = torch.nn.Parameter(torch.zeros(stock.weight.shape, dtype=torch.bfloat16), requires_grad=False)
    with record() as found["nodes"], attach(model, canonical_name):
        stock(x)
        layer.self_attn.o_proj(x.repeat(1, stock.input_size)[:, : layer.self_attn.o_proj.input_size])
    try:
        require_our_methods(model)
    except RuntimeError as error:
        found["refusal"] = str(error)
    torch.save(found, out / "found.pt")


def _load_model(model_dir: Path) -> torch.nn.Module:
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from jetrl_megatron.rollout.engine import EngineSpec

    spec = EngineSpec(model_dir, "jetrl_fp8", 1, 8, 1024, 64, 0.3, 1, 0, model_dir / "log")
    server_args = ServerArgs(**spec.server_args())
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    return runner.torch_runner.model


if __name__ == "__main__":
    main()
