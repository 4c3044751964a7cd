"""SGLang's own launch of an engine's schedulers, with stand-ins that only write down which GPU they were given; before
that, what SGLang makes of an engine's arguments for CUDA graphs.

Arguments: model folder, where they write it, and first GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jetrl_megatron.rollout.engine import EngineSpec

TENSOR_PARALLEL = 2


def write_gpu(server_args: Any, ports: Any, gpu_id: int, tp_rank: int, *_rest: Any) -> None:
    """In the place of SGLang's scheduler process."""
    (Path(server_args.model_path) / f"gpu_of_rank_{tp_rank}").write_text(f"{server_args.device}:{gpu_id}")


def write_graphs(spec: EngineSpec) -> None:
    """What SGLang makes of the arguments for graphs, after all its own rules."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(**spec.server_args())
    server_args.resolve_once()
    graphs = resolved_view(server_args).cuda_graph_config
    written = {"decode": graphs.decode.backend, "batches": graphs.decode.bs, "prefill": graphs.prefill.backend}
    (spec.model_dir / "graphs.json").write_text(json.dumps(written))


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    folder, first_gpu = Path(sys.argv[1]), int(sys.argv[2])
    spec = EngineSpec(folder, "jetrl_fp8", TENSOR_PARALLEL, 8, 1024, 64, 0.3, 1, 0, folder / "log", first_gpu=first_gpu)
    write_graphs(replace(spec, tensor_parallel=1, cuda_graphs=True))
    server_args = ServerArgs(**spec.server_args())
    server_args.resolve_once()
    publish(server_args, role="tokenizer")
    _, processes = Engine._launch_scheduler_processes(server_args, PortArgs.init_new(server_args), write_gpu)
    for process in processes or []:
        process.join()


if __name__ == "__main__":
    main()
