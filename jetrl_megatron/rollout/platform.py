"""SGLang platform plugin (entry point group `sglang.srt.platforms`): a CPU whose fused operators run `forward_native`.

Active only where CUDA is absent; on a GPU the normal platform stays.
"""

from __future__ import annotations


def activate() -> str | None:
    """Class path of our platform, or None to leave SGLang's own."""
    import torch

    return None if torch.cuda.is_available() else "jetrl_megatron.rollout.cpu_platform.JetrlCpuPlatform"
