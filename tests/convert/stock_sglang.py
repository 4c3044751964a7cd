"""Stock SGLang, our plugin inactive, loads an FP8 checkpoint with its own loader. Arguments: model folder, output file.

Only the repacking for the machine's FP8 kernels is left out: a CPU has none. Run with `sglang_environment`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from jetrl_megatron.rollout.environment import ENGINE_FLAG, engine_environment, is_engine_process


def sglang_environment() -> dict[str, str]:
    """Of a process in which SGLang can be imported and our plugin does nothing."""
    env = engine_environment(num_threads=1, tensor_parallel=1)
    del env[ENGINE_FLAG]
    return env


def main() -> None:
    assert not is_engine_process()
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])

    from sglang.benchmark import one_batch
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    Fp8LinearMethod.process_weights_after_loading = lambda self, layer: None
    server_args = ServerArgs(
        model_path=str(model_dir),
        device="cpu",
        attention_backend="torch_native",
        disable_cuda_graph=True,
        mem_fraction_static=0.3,
        max_total_tokens=1024,
        max_running_requests=4,
    )
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    runner, _ = one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
    model = runner.torch_runner.model
    layer = model.model.layers[0]
    linears = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    assert {type(linear.quant_method) for linear in linears} == {Fp8LinearMethod}
    torch.save({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, out)


if __name__ == "__main__":
    main()
