"""Stock SGLang for bench_rollout.py, in a process where our plugin stays inactive. `python stock_engine.py FD`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from jetrl_megatron.rollout.environment import ENGINE_FLAG, engine_environment, is_engine_process


class StockEngine:
    """Client. args: keyword arguments of `sglang.Engine`."""

    def __init__(self, args: dict[str, Any], log: BinaryIO) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        env = engine_environment(num_threads=1, tensor_parallel=1)
        del env[ENGINE_FLAG]
        command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        theirs.close()
        self._connection.send(args)

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[int]:
        """Number of generated tokens per prompt."""
        self._connection.send((prompts, sampling))
        counts: list[int] = self._connection.recv()
        return counts

    def child_pids(self) -> list[int]:
        """SGLang's processes."""
        return [child.pid for child in psutil.Process(self._process.pid).children(recursive=True)]

    def shutdown(self) -> None:
        self._connection.close()
        self._process.wait(timeout=60)


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    assert not is_engine_process()
    import sglang

    connection = Connection(descriptor)
    engine = sglang.Engine(**connection.recv())
    while True:
        try:
            prompts, sampling = connection.recv()
        except EOFError:
            break
        repeated = [list(ids) for ids, count in Counter(map(tuple, prompts)).items() if count > 1]
        engine.generate(input_ids=repeated, sampling_params={"max_new_tokens": 1})  # as our host does
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        connection.send([len(output["meta_info"]["output_token_logprobs"]) for output in outputs])
    engine.shutdown()


if __name__ == "__main__":
    main()
