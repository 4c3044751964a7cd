"""The environment of engine processes: the one place of this package that sets library variables."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

SHIMS = Path(__file__).parent / "shims"
ENGINE_FLAG = "JETRL_ENGINE"  # set in every process of an engine of ours
OPERATOR_TIMES = "JETRL_OPERATOR_TIMES"  # folder in which engines keep seconds per operator; unset: they are not timed
PRECISION_FLOW = "JETRL_PRECISION_FLOW"  # folder that asks this engine for its precision-flow graphs while it exists


def is_engine_process() -> bool:
    """Whether this process belongs to an engine that was started by `engine_environment`."""
    return os.environ.get(ENGINE_FLAG) == "1"


def operator_times_file() -> Path | None:
    """Where this engine process writes its operator times, if it is asked to."""
    folder = os.environ.get(OPERATOR_TIMES)
    return Path(folder) / f"{os.getpid()}.json" if folder else None


def precision_flow_folder() -> Path | None:
    """Where this engine process looks for requests to record itself; None in engines without a host of ours."""
    folder = os.environ.get(PRECISION_FLOW)
    return Path(folder) if folder else None


def engine_threads() -> int:
    """CPU threads of this engine process."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def engine_environment(num_threads: int, tensor_parallel: int) -> dict[str, str]:
    """os.environ plus what SGLang needs: thread counts, no model hub, no torch.distributed leftovers of the trainer."""
    dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK")
    env = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("TORCHELASTIC_")}
    env[ENGINE_FLAG] = "1"
    env["OMP_NUM_THREADS"] = str(num_threads)
    env["HF_HUB_OFFLINE"] = "1"
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["PYTHONWARNINGS"] = "ignore"
    # The training ranks on an engine's GPUs allocate while it starts, each at its own pace.
    env.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    if tensor_parallel > 1:
        cores = os.cpu_count() or 1
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(i % cores) for i in range(tensor_parallel))
    if importlib.util.find_spec("torchvision") is None:
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(SHIMS), env.get("PYTHONPATH", "")) if p)
    return env
