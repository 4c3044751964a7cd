"""Checkpoints in Megatron's distributed format (torch_dist): model, fp32 masters, optimizer and schedule.

A checkpoint is a folder `step_NNNNNN` that appears by rename when it is complete; a killed save leaves only a
temporary folder, which the next save removes. It can be loaded at other tensor- and pipeline-parallel sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from jetrl_megatron.megatron.optimizer import Trainable

STATE_FILE = "trainer_state.json"
_NAME = re.compile(r"^step_(\d{6})$")


@dataclass(frozen=True)
class TrainerState:
    """What the loop needs besides tensors. step: completed RL steps; weight_version: optimizer updates so far."""

    step: int
    weight_version: int


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest step, or None."""
    complete = [p for p in folder.glob("step_*") if _NAME.match(p.name) and (p / STATE_FILE).is_file()]
    return max(complete, default=None, key=lambda p: p.name)


def read_state(checkpoint: Path) -> TrainerState:
    return TrainerState(**json.loads((checkpoint / STATE_FILE).read_text()))


def save_checkpoint(folder: Path, trainable: Trainable, state: TrainerState, keep: int) -> Path:
    """Every rank calls it. Keeps the newest `keep` checkpoints."""
    final = folder / f"step_{state.step:06d}"
    temporary = folder / f".{final.name}.tmp"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(trainable, is_loading=False), str(temporary))
    dist.barrier()
    if dist.get_rank() == 0:
        (temporary / STATE_FILE).write_text(json.dumps(asdict(state)))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        newest_first = sorted((p for p in folder.iterdir() if _NAME.match(p.name)), reverse=True)
        for old in newest_first[keep:]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return final


def load_checkpoint(checkpoint: Path, trainable: Trainable) -> TrainerState:
    """Restore everything in place. Every rank calls it."""
    loaded: dict[str, Any] = dist_checkpointing.load(_sharded(trainable, is_loading=True), str(checkpoint))
    for model, state_dict in zip(trainable.policy.models, loaded["model"], strict=True):
        model.load_state_dict(state_dict)
    trainable.optimizer.load_state_dict(loaded["optimizer"])
    trainable.scheduler.load_state_dict(loaded["scheduler"])
    state = read_state(checkpoint)
    trainable.policy.weights_changed(state.weight_version)
    return state


def _sharded(trainable: Trainable, is_loading: bool) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    models = [model.sharded_state_dict(metadata=metadata) for model in trainable.policy.models]
    return {
        "model": models,
        "optimizer": trainable.optimizer.sharded_state_dict(models, is_loading=is_loading),
        "scheduler": trainable.scheduler.state_dict(),
    }
