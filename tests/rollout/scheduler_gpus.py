"""SGLang's own launch of an engine's schedulers, with stand-ins that only write down which GPU they were given.

Arguments: model folder, where they write it, and first GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jetrl_megatron.rollout.engine import EngineSpec

TENSOR_PARALLEL = 2


def write_gpu(server_args: Any, ports: Any, gpu_id: int, tp_rank: int, *_rest: Any) -> None:
    """In the place of SGLang's scheduler process."""
    (Path(server_args.model_path) / f"gpu_of_rank_{tp_rank}").write_text(f"{server_args.device}:{gpu_id}")


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    folder, first_gpu = Path(sys.argv[1]), int(sys.argv[2])
    spec = EngineSpec(folder, "jetrl_fp8", TENSOR_PARALLEL, 8, 1024, 64, 0.3, 1, 0, folder / "log", first_gpu=first_gpu)
    server_args = ServerArgs(**spec.server_args())
    server_args.resolve_once()
    publish(server_args, role="tokenizer")
    _, processes = Engine._launch_scheduler_processes(server_args, PortArgs.init_new(server_args), write_gpu)
    for process in processes or []:
        process.join()


if __name__ == "__main__":
    main()
