"""The small process that owns one `sglang.Engine` and answers the trainer over a socket.

A dying SGLang child kills its parent; here that parent is this process, so the trainer only sees a closed socket.
Run as `python -m jetrl_megatron.rollout.host FD`, FD being one end of a socket pair.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from jetrl_megatron.ops.precision_flow import Graph
from jetrl_megatron.rollout.engine import Completion, EngineSpec, Request
from jetrl_megatron.rollout.flow import read_graphs, requested


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_die_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)  # else the trainer would not see this process end
    host = _Host(connection.recv())
    connection.send(("ok", None))
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:
            break
        if command == "shutdown":
            break
        try:
            connection.send(("ok", getattr(host, command)(argument)))
        except (RuntimeError, ValueError) as error:
            connection.send(("refused", f"{type(error).__name__}: {error}"))
    host.close()


def _die_with_parent(parent: int) -> None:
    """Never outlive the trainer, whatever kills it: end this process group, SGLang's children included. (The kernel's
    PDEATHSIG follows the parent's THREAD, which ends after an engine restart.)"""
    while os.getppid() == parent:
        time.sleep(0.3)
    os.killpg(os.getpgid(0), signal.SIGKILL)


class _Host:
    def __init__(self, spec: EngineSpec) -> None:
        import sglang

        self.spec = spec
        self.engine = sglang.Engine(**spec.server_args())
        self._received: Path | None = None  # the bundle that came over the connection
        self._routes_shape: tuple[int, int, int] | None = None
        if spec.record_routes:
            model = self.engine.tokenizer_manager.model_config.hf_text_config
            self._routes_shape = (-1, model.num_hidden_layers, model.num_experts_per_tok)

    def receive_file(self, argument: tuple[str, bytes]) -> None:
        """A file of a weight bundle, for a host on another node than the trainer's; older bundles go."""
        path = Path(argument[0])
        if self._received is not None and self._received != path.parent:
            shutil.rmtree(self._received, ignore_errors=True)
        self._received = path.parent
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(argument[1])

    def close(self) -> None:
        self.engine.shutdown()
        if self._received is not None:
            shutil.rmtree(self._received.parent, ignore_errors=True)

    def load_weights(self, argument: tuple[str, int]) -> str:
        """(path of the bundle, version) -> digest of what the engine holds."""
        from jetrl_megatron.rollout.weight_loader import LOAD_FORMAT, encode_path

        path, _version = argument
        _require(*self.engine.begin_weight_update())
        accepted, message = self.engine.update_weights_from_tensor(
            [("bundle", encode_path(Path(path)))], load_format=LOAD_FORMAT, flush_cache=True
        )
        _require(*self.engine.end_weight_update())
        _require(accepted, message)
        return str(message)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Prompts that occur several times (the samples of a group) are prefilled once, first: SGLang shares prefixes
        between batches, not inside one."""
        counts = Counter(r.token_ids for r in requests)
        if repeated := [list(ids) for ids, count in counts.items() if count > 1]:
            self.engine.generate(input_ids=repeated, sampling_params={"max_new_tokens": 1, "temperature": 0.0})
        outputs = self.engine.generate(
            input_ids=[list(r.token_ids) for r in requests],
            sampling_params=[_sampling_params(r) for r in requests],
            return_logprob=True,
            return_routed_experts=self._routes_shape is not None,
        )
        return [_completion(output, self._routes_shape) for output in outputs]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        outputs = self.engine.generate(
            input_ids=[list(ids) for ids in sequences],
            sampling_params={"max_new_tokens": 1, "temperature": 0.0},
            return_logprob=True,
            logprob_start_len=0,
        )
        return [[entry[0] for entry in o["meta_info"]["input_token_logprobs"][1:]] for o in outputs]

    def record_flow(self, request: Request) -> list[Graph]:
        folder = self.spec.flow_folder
        with requested(folder):
            self.engine.generate(
                input_ids=list(request.token_ids),
                sampling_params={**_sampling_params(request), "ignore_eos": True},
                return_logprob=True,
            )
            return read_graphs(folder, self.spec.tensor_parallel, timeout_s=60)

    def pids(self, _argument: None) -> list[int]:
        """Process ids of the engine's children, for supervision tests."""
        import psutil

        return [child.pid for child in psutil.Process().children(recursive=True)]


def _require(success: bool, message: str) -> None:
    if not success:
        raise RuntimeError(message)


def _sampling_params(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "sampling_seed": request.seed,
    }


def _completion(output: dict[str, Any], routes_shape: tuple[int, int, int] | None) -> Completion:
    """routes_shape: of the routed experts [-1, layers, k], where they are recorded."""
    info = output["meta_info"]
    entries = info["output_token_logprobs"]
    reason = info["finish_reason"]["type"]
    if reason not in ("stop", "length"):
        raise RuntimeError(f"request ended with {info['finish_reason']}")
    routes = None
    if routes_shape is not None:
        routes = np.frombuffer(base64.b64decode(info["routed_experts"]), np.int32).reshape(routes_shape)
    return Completion(
        token_ids=[entry[1] for entry in entries],
        logprobs=[entry[0] for entry in entries],
        finish_reason=reason,
        num_retractions=info.get("num_retractions") or 0,
        routed_experts=routes,
    )


if __name__ == "__main__":
    main()
