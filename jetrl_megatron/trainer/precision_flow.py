"""The precision-flow check of a run: both graphs recorded, compared, written, and judged (docs/precision_flow.md)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.megatron.flow import record_training
from jetrl_megatron.ops.precision_flow import SCHEMA, Difference, Graph, compare, describe
from jetrl_megatron.rollout.engine import EngineRefusedError, Request, Sampling
from jetrl_megatron.trainer import files
from jetrl_megatron.trainer.flow_picture import draw
from jetrl_megatron.trainer.session import Session

log = logging.getLogger(__name__)
NUM_TOKENS = 8
NUM_NEW_TOKENS = 3


class PrecisionFlowError(RuntimeError):
    """The rollout's precision flow is not part of the training forward's."""

    def __init__(self, differences: Sequence[str]) -> None:
        super().__init__("\n  ".join(["rollout is not a subgraph of the training forward:", *differences]))


def check_at_start(session: Session) -> None:
    """The check of every run, into its folder. Raises PrecisionFlowError under `precision.flow_check: error`."""
    lines = check_flow(session, session.run_dir / files.PRECISION_FLOW)
    if lines and session.cfg.precision.flow_check == "error":
        raise PrecisionFlowError(lines)
    if session.ranks.is_main:
        verdict = str(PrecisionFlowError(lines)) if lines else "rollout is a subgraph of the training forward"
        log.log(logging.WARNING if lines else logging.INFO, "precision flow: %s", verdict)


def check_flow(session: Session, out: Path) -> list[str]:
    """Record both sides of the session's model, layout and engines, and write the graphs, the picture and the verdict
    into `out`. Every rank calls it, after a first weight sync, and gets the differences in words: none for a subgraph.
    Raises PrecisionFlowError if an engine cannot be recorded."""
    training = record_training(session.trainable, NUM_TOKENS, session.cfg.rollout.temperature)
    lines: list[list[str]] = [[]]
    if session.engines is not None:
        request = Request(
            tuple(i % session.policy.dims.vocab_size for i in range(NUM_TOKENS)),
            Sampling(session.cfg.rollout.temperature, 1.0, -1, NUM_NEW_TOKENS, ()),
            seed=0,
        )
        try:
            rollout = session.engines.record_flow(request)
        except EngineRefusedError as error:
            raise PrecisionFlowError([f"the engine was not recorded: {error}"]) from error
        lines = [write_flow(out, training, rollout)]
    dist.broadcast_object_list(lines, src=0)
    return lines[0]


def write_flow(out: Path, training: Sequence[Graph], rollout: Sequence[Graph]) -> list[str]:
    """Compare and write train.json, rollout.json, verdict.json and flow.svg.

    training, rollout: the graphs of all ranks and engines; the first of each side and phase is written and drawn, every
    one is compared with the first training graph. Returns the differences in words."""
    differences = judge(training, rollout)
    lines = describe(differences)
    phases = {graph.side: graph for graph in reversed(rollout)}
    documents: dict[str, Any] = {
        files.TRAIN_GRAPH: training[0].to_json(),
        files.ROLLOUT_GRAPHS: {side: phases[side].to_json() for side in ("prefill", "decode")},
        files.VERDICT: {
            "schema": SCHEMA,
            "subgraph": not differences,
            "differences": lines,
            "details": [asdict(difference) for difference in differences],
        },
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        write_atomic(out / name, json.dumps(document, indent=1))
    write_atomic(out / files.FLOW_PICTURE, draw(training[0], phases["prefill"], phases["decode"]))
    return lines


def judge(training: Sequence[Graph], rollout: Sequence[Graph]) -> list[Difference]:
    """Differences between the first training graph and every other graph: training ranks among each other, too."""
    return [d for other in (*training[1:], *rollout) for d in compare(training[0], other)]
