"""SGLang's own decode graph runner around a real model with our operators, its graphs recorded instead of captured
(`tests/support/recorded_graph.py`), in an engine's environment and Triton's interpreter.

Arguments: model folder, quantization method, bundle A, bundle B, 1 for a long prompt and controls, output folder, which
gets found.pt.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support.recorded_graph import RecordedGraph

CAPTURED_BATCH = 4


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    model_dir, method, bundle_a, bundle_b, thorough, out = sys.argv[1:7]
    runner = load_runner(Path(model_dir), method)
    update(runner, bundle_a)
    graph_runner = captured(runner)
    batch = prefill(runner, (5, 520 if thorough == "1" else 20, 9))  # 520 tokens: a second segment of keys
    generator = torch.Generator().manual_seed(0)

    def step() -> tuple[Tensor, Tensor]:
        """Logits of one decode step of the batch on random tokens: eager, replayed."""
        batch.input_ids = torch.randint(3, 100, (batch.batch_size(),), generator=generator)
        batch.prepare_for_decode()
        eager = forward(runner, batch, None)
        forget(runner, batch.out_cache_loc)
        replayed = forward(runner, batch, graph_runner)
        assert replayed.can_run_graph
        assert not eager.can_run_graph
        return logits(eager), logits(replayed)

    steps = {"3 of 4 rows": step(), "the next tokens": step()}
    batch.filter_batch(keep_indices=[2, 1])
    steps["2 other rows"] = step()
    inputs = graph_runner.backend.graph.inputs
    update(runner, bundle_b)
    steps["new weights"] = step()
    found: dict[str, Any] = {"steps": steps, "num_operations": len(graph_runner.backend.graph)}
    again = captured(runner).backend.graph.inputs
    found["moved"] = len(inputs ^ again)
    found["num_inputs"] = len(inputs)
    found["watched"] = watched(runner, batch, graph_runner)
    if thorough == "1":
        found["controls"] = controls(runner, step, bundle_a)
    torch.save(found, Path(out) / "found.pt")


def load_runner(model_dir: Path, method: str) -> Any:
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    from jetrl_megatron.rollout.engine import EngineSpec

    spec = EngineSpec(model_dir, method, 1, CAPTURED_BATCH, 1024, 1024, 0.3, 1, 0, model_dir / "log")
    server_args = ServerArgs(**spec.server_args())
    server_args.resolve_once()
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    return one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)[0].torch_runner


def update(runner: Any, bundle: str) -> None:
    """A weight update, as the engine does it."""
    from jetrl_megatron.rollout.weight_loader import LOAD_FORMAT, encode_path

    runner.weight_updater.begin_weight_update()
    done, message = runner.weight_updater.update_weights_from_tensor(
        [("bundle", encode_path(Path(bundle)))], load_format=LOAD_FORMAT
    )
    assert done, message
    runner.weight_updater.end_weight_update(run_post_load=False)


class RecordedGraphs:
    """SGLang's graph backend: one shape."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.graph = RecordedGraph()
        self.output: Any = None

    @contextlib.contextmanager
    def capture_session(self, _stream: Any) -> Any:
        yield

    def capture_one(self, _key: Any, forward: Any, **_kwargs: Any) -> None:
        with torch.no_grad():
            forward()  # a warm-up, as SGLang does it
            with self.graph.capture():
                self.output = forward()

    def can_run(self, *_args: Any) -> bool:
        return True

    replay_session = staticmethod(contextlib.nullcontext)

    def replay(self, *_args: Any, **_kwargs: Any) -> Any:
        self.graph.replay()
        return self.output


def captured(runner: Any) -> Any:
    """A graph runner of SGLang, its graph captured; what asks CUDA for streams and events is left out."""
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module

    class Runner(module.DecodeCudaGraphRunner):  # type: ignore[misc, name-defined]
        def _record_in_graph_metadata_prep_done(self) -> None: ...

        def _publish_read_done(self, in_graph: bool) -> None: ...

    with (
        mock.patch.object(module, "resolve_decode_backend", RecordedGraphs),
        mock.patch.object(module, "graph_capture", no_stream),
        mock.patch.object(module, "get_or_create_global_graph_capture_stream", no_stream),
        mock.patch.object(module, "get_batch_sizes_to_capture", return_value=([CAPTURED_BATCH], [])),
    ):
        return Runner(runner)


def no_stream(**_kwargs: Any) -> Any:
    return contextlib.nullcontext(SimpleNamespace(stream=None))


def prefill(runner: Any, lengths: tuple[int, ...]) -> Any:
    from sglang.benchmark import one_batch

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 100, (length,), generator=generator).tolist() for length in lengths]
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(len(ids), 0, custom_inputs=ids)
    return one_batch.extend(requests, runner)[2]


@torch.no_grad()
def forward(runner: Any, batch: Any, graph_runner: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    runner.decode_cuda_graph_runner = graph_runner
    return runner.forward(ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False))


def logits(output: Any) -> Tensor:
    return output.logits_output.next_token_logits.clone()


def forget(runner: Any, slots: Tensor) -> None:
    """Clear what a forward wrote into the pool, so that the next one must write it again."""
    for layer in range(runner.model_config.num_hidden_layers):
        runner.token_to_kv_pool.get_key_buffer(layer)[slots] = 0
        runner.token_to_kv_pool.get_value_buffer(layer)[slots] = 0


def watched(runner: Any, batch: Any, graph_runner: Any) -> dict[str, tuple[bool, int]]:
    """While operators are recorded, or timed: whether the graph ran, and how many operators were seen."""
    from jetrl_megatron.ops.recorder import record
    from jetrl_megatron.ops.timing import time_operators

    with record() as nodes:
        recorded = forward(runner, batch, graph_runner).can_run_graph, len(nodes)
    with time_operators() as seconds:
        timed = forward(runner, batch, graph_runner).can_run_graph
    return {"recorded": recorded, "timed": (timed, len(seconds))}


def controls(runner: Any, step: Any, bundle: str) -> dict[str, Any]:
    """What was in the way of graphs: a rope table that grows, weights prepared anew in other memory."""
    from jetrl_megatron.ops.rope import RopeTable

    lookup = RopeTable.lookup

    def growing(table: RopeTable, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert int(positions.max()) < table.num_positions
        return lookup(table, positions)

    refused = ""
    with mock.patch.object(RopeTable, "lookup", growing):
        try:
            captured(runner)
        except Exception as error:  # SGLang wraps what a capture raises
            refused = str(error)
    for module in runner.model.modules():
        module.__dict__.pop("jetrl_weight", None)
    update(runner, bundle)
    return {"a growing rope table": refused, "weights in other memory": step()}


if __name__ == "__main__":
    main()
