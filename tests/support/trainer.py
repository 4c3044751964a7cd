"""A one-rank trainer inside the test process: a policy of real Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jetrl_megatron.config.dims import ModelDims
from jetrl_megatron.config.schema import ParallelConfig
from jetrl_megatron.fp8 import Fp8Recipe
from tests.support.launch import join_alone

if TYPE_CHECKING:
    from jetrl_megatron.megatron.groups import Ranks


_alone: list[Ranks] = []


def one_rank() -> Ranks:
    """Megatron's groups of a world of one, made once: each set costs two dozen gloo threads, which poll until the
    process ends."""
    from megatron.core import parallel_state

    from jetrl_megatron.megatron.groups import initialize

    if not _alone or not parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        _alone[:] = [initialize(ParallelConfig(), seed=0)]
    return _alone[0]


def load_policy(  # type: ignore[no-untyped-def]
    model_dir: Path, fp8: bool, recipe: Fp8Recipe | None = None, tp_invariant: bool = True
):
    """The policy of an HF folder, TP 1."""
    from jetrl_megatron.megatron.gather import load_hf
    from jetrl_megatron.megatron.linear import LinearPrecision
    from jetrl_megatron.megatron.model import build_policy
    from jetrl_megatron.weights.io import HfCheckpoint

    join_alone()
    ranks = one_rank()
    checkpoint = HfCheckpoint(model_dir)
    precision = LinearPrecision(fp8, recipe or Fp8Recipe(), tp_invariant)
    policy = build_policy(ModelDims.from_hf(checkpoint.config), ParallelConfig(), ranks, precision)
    load_hf(policy, checkpoint)
    return policy
