"""The rollout graphs: one prefill and one decode of the real engine, recorded in every one of its scheduler processes.

A folder is the request: while it exists, each process records the next batch of either phase and writes PHASE.PID.json
into it. Else a batch costs one look at the file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.fp8.recorder import Node, record
from jetrl_megatron.ops.precision_flow import Graph
from jetrl_megatron.ops.recorder import attach

PHASES = ("prefill", "decode")
_NORM = re.compile(r"^(model\.layers)\.(\d+)\.(input_layernorm|post_attention_layernorm)$")


class FlowRecorder:
    """Hooks around a scheduler's forward and sampler; the sampler, where the log-probs are, ends a batch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._phase: str | None = None
        self._nodes: list[Node] = []
        self._num_layers = 0

    def forward(self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND ModelRunner.forward."""
        self._phase = self._asked_for(forward_batch.forward_mode)
        if self._phase is None:
            return original(runner, forward_batch, *args, **kwargs)
        self._num_layers = int(runner.model.config.num_hidden_layers)
        with record() as self._nodes, attach(runner.model, canonical_name):
            return original(runner, forward_batch, *args, **kwargs)

    def sample(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """AROUND Sampler.forward."""
        if self._phase is None:
            return original(*args, **kwargs)
        with record() as nodes:
            ids = original(*args, **kwargs)
        graph = Graph.of(self._phase, [hf_owner(node, self._num_layers) for node in [*self._nodes, *nodes]])
        write_atomic(self._file(self._phase), json.dumps(graph.to_json()))
        self._phase = None
        return ids

    def _asked_for(self, mode: Any) -> str | None:
        if not self._folder.is_dir():
            return None
        phase = "decode" if mode.is_decode() else "prefill" if mode.is_extend() else None
        return phase if phase is not None and not self._file(phase).exists() else None

    def _file(self, phase: str) -> Path:
        return self._folder / f"{phase}.{os.getpid()}.json"


def canonical_name(path: str) -> str | None:
    """SGLang's models are named like Hugging Face's; what runs outside their modules belongs to the head."""
    return path if path not in ("", "model") else None


def hf_owner(node: Node, num_layers: int) -> Node:
    """SGLang adds the residual inside the norm that follows; in Hugging Face's model, and in Megatron, the add belongs
    to the layer whose output it adds. Its router chooses experts outside the gate and combines inside the experts."""
    if node.operator == "route":
        return replace(node, module=f"{node.module}.gate")
    if node.operator == "moe_combine":
        return replace(node, module=node.module.removesuffix(".experts"))
    if node.operator != "residual_add":
        return node
    norm = _NORM.match(node.module)
    if norm is None:
        return replace(node, module=f"model.layers.{num_layers - 1}") if node.module == "model.norm" else node
    layer = int(norm[2]) - (norm[3] == "input_layernorm")
    return replace(node, module=f"{norm[1]}.{layer}")


@contextmanager
def requested(folder: Path) -> Iterator[None]:
    """Ask the processes of an engine to record, for the time of the block."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder)


def read_graphs(folder: Path, num_ranks: int, timeout_s: float) -> list[Graph]:
    """The graphs of all engine ranks. Raises RuntimeError if some are not there in time: a rank may still be writing
    when another one's answer has arrived."""
    deadline = time.monotonic() + timeout_s
    while len(files := sorted(folder.glob("*.json"))) < num_ranks * len(PHASES):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"precision flow: {len(files)} graphs of {num_ranks} engine ranks, expected a prefill "
                "and a decode of each"
            )
        time.sleep(0.01)
    graphs = [Graph.from_json(json.loads(file.read_text())) for file in files]
    return sorted(graphs, key=lambda graph: PHASES.index(graph.side))
