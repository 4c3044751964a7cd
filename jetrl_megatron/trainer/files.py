"""The run folder: file names and the status."""

from __future__ import annotations

import json
import os
from pathlib import Path

from jetrl_megatron.atomic import write_atomic

CONFIG_FILE = "config.resolved.yaml"
STATUS_FILE = "status.json"
STOP_REQUEST = "stop.request"  # while it exists, the run is asked to stop after its current step
CHECKPOINTS = "checkpoints"
INITIAL_MODEL = "initial_model"
ENGINE_MODEL = "engine_model"
HF_EXPORT = "hf"
LOGS = "logs"
PRECISION_FLOW = "precision_flow"  # folder of the four files below
TRAIN_GRAPH = "train.json"
ROLLOUT_GRAPHS = "rollout.json"
VERDICT = "verdict.json"
FLOW_PICTURE = "flow.svg"


def write_status(run_dir: Path, step: int, phase: str) -> None:
    """`status.json`: where the run is now, for people, monitors and launchers. The phase is one of a step's, or, at the
    end, `done` or `stopped` (asked to stop; --resume continues)."""
    write_atomic(run_dir / STATUS_FILE, json.dumps({"step": step, "phase": phase, "pid": os.getpid()}))
