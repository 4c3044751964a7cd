"""Training and rollout on the Triton backend, in a process that was started for it: on the first GPU, or in Triton's
interpreter (TRITON_INTERPRET is read when triton is imported; engines inherit it).

Arguments: model folder, output folder, which gets found.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from jetrl_megatron.config.schema import OptimizerConfig
from jetrl_megatron.fp8.backends import use_backend
from jetrl_megatron.megatron.optimizer import Trainable, make_trainable
from jetrl_megatron.megatron.step import compute_logprobs, pack
from jetrl_megatron.ops.precision_flow import describe
from jetrl_megatron.rollout.engine import Completion
from jetrl_megatron.trainer.precision_flow import judge
from tests.support.engines import (
    engine,
    engine_logprobs,
    prompts,
    publish,
    requests,
    rollout_flow,
    trainer_logprobs,
    training_flow,
)
from tests.support.policies import gradients, micro_batches
from tests.support.trainer import load_policy

TEMPERATURE = 0.8
Prompts = list[tuple[int, ...]]


def main() -> None:
    model_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    use_backend("triton")
    policy = load_policy(model_dir, fp8=True, tp_invariant=False)
    trainable = make_trainable(policy, OptimizerConfig(lr=1e-2), 10)
    ids = prompts(policy.dims.vocab_size, count=3, longest=30)
    found: dict[str, Any] = {}
    on_gpu = torch.cuda.is_available()
    length = 40 if on_gpu else 4
    device = {"first_gpu": 0, "cuda_graphs": True} if on_gpu else {}
    bundles = []
    with engine(model_dir, out / "engine", backend="triton", max_running_requests=4, **device) as pool:
        for version in (0, 1):
            bundles.append(publish(policy, out, version))
            pool.load_weights(bundles[version])
            completions = pool.generate(requests(ids, TEMPERATURE, max_new_tokens=length))
            found[f"decode {version}"] = (
                engine_logprobs(completions),
                trainer_logprobs(policy, ids, completions, TEMPERATURE),
            )
            if version == 0:
                train(trainable, ids, completions)
        found["prefill"] = (
            torch.tensor([value for score in pool.score(ids[1:]) for value in score]),
            torch.cat(compute_logprobs(policy, [pack([(p, 1)], 1.0, pad_multiple=1) for p in ids[1:]])),
        )
        training, rollout = training_flow(policy), rollout_flow(pool)
        pool.load_weights(bundles[0])
        found["decode 0 again"] = engine_logprobs(pool.generate(requests(ids, TEMPERATURE, max_new_tokens=length)))
    found["flow"] = describe(judge(training, rollout))
    found["kernels"] = {
        side: {node.operator: node.kernels for graph in graphs for node in graph.nodes}
        for side, graphs in (("training", training), ("rollout", rollout))
    }
    torch.save(found, out / "found.pt")


def train(trainable: Trainable, ids: Prompts, completions: list[Completion]) -> None:
    """One optimizer step on the rollout."""
    seqs = [([*p, *c.token_ids], len(p)) for p, c in zip(ids, completions, strict=True)]
    gradients(trainable, micro_batches(seqs, 1, TEMPERATURE, 1, False), sum(len(c.token_ids) for c in completions))
    trainable.apply()


if __name__ == "__main__":
    main()
