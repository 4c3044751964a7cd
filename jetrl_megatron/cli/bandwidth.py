"""Network bandwidth between nodes, under torchrun: `python -m jetrl_megatron.cli.bandwidth --nodes a,b --out FILE`.

First every pair of neighbouring nodes (rank 0 of each), since an all-reduce only says that somebody is slow; then an
all-reduce over all ranks. NCCL where there are GPUs, else gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.trainer.worker import tie_to_launcher

NUM_ROUNDS = 5


def slow_nodes(pairs: Mapping[tuple[str, str], float], floor: float) -> list[str]:
    """The nodes that explain the slow pairs: those in most slow pairs; with one slow pair of two nodes, both."""
    counts = Counter(node for pair, rate in pairs.items() if rate < floor for node in pair)
    return sorted(node for node, count in counts.items() if count == max(counts.values()))


def measure(nodes: Sequence[str], size_bytes: int) -> tuple[dict[tuple[str, str], float], float]:
    """(GB/s of every pair of neighbours, bus bandwidth of the all-reduce in GB/s), on every rank."""
    import torch
    import torch.distributed as dist

    local_rank, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if cuda else "gloo")
    data = torch.ones(size_bytes // 4, device="cuda" if cuda else "cpu")

    def seconds(action: object) -> float:
        times = []
        for _ in range(NUM_ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            action()  # type: ignore[operator]
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    rank, num_nodes = dist.get_rank(), len(nodes)
    pairs = {}
    for a in range(num_nodes if num_nodes > 2 else num_nodes - 1):
        b = (a + 1) % num_nodes
        first, second = a * per_node, b * per_node

        def exchange(first: int = first, second: int = second) -> None:
            if rank == first:
                dist.send(data, second)
                dist.recv(data, second)
            elif rank == second:
                dist.recv(data, first)
                dist.send(data, first)

        box = [2 * size_bytes / seconds(exchange) / 1e9]
        dist.broadcast_object_list(box, src=first)
        pairs[nodes[a], nodes[b]] = box[0]
    world = dist.get_world_size()
    box = [2 * (world - 1) / world * size_bytes / seconds(lambda: dist.all_reduce(data)) / 1e9]
    dist.broadcast_object_list(box, src=0)
    dist.destroy_process_group()
    return pairs, box[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", required=True, help="names of the nodes in rank order, comma-separated")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--size-mib", type=int, default=64)
    parser.add_argument("--floor-gbps", type=float, default=0.0, help="GB/s of every pair and the all-reduce")
    options = parser.parse_args()
    tie_to_launcher()
    pairs, bus = measure(options.nodes.split(","), options.size_mib << 20)
    if os.environ["RANK"] != "0":
        return
    slow = slow_nodes(pairs, options.floor_gbps)
    fit = not slow and bus >= options.floor_gbps
    for (a, b), rate in pairs.items():
        print(f"bandwidth {a} <-> {b}: {rate:.2f} GB/s{'' if rate >= options.floor_gbps else '  BELOW THE FLOOR'}")
    print(f"bandwidth all-reduce: {bus:.2f} GB/s bus")
    if not fit:
        print(f"error: below {options.floor_gbps} GB/s; slow: {', '.join(slow) or 'no single pair'}; fix: drain it")
    named = {f"{a}-{b}": rate for (a, b), rate in pairs.items()}
    write_atomic(options.out, json.dumps({"fit": fit, "pairs_gbps": named, "all_reduce_gbps": bus, "slow": slow}))


if __name__ == "__main__":
    main()
