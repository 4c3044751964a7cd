"""A decode step of the engine's attention backend on tensors without values (meta device), in an engine's environment.

Prints DECODES, and then READS if a prefill of the same tensors reads values (the control).
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from jetrl_megatron.fp8.gpu.launch import Plan
from jetrl_megatron.ops.kernels import use_kernels
from jetrl_megatron.rollout.attention import PagedAttentionBackend


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def main() -> None:
    plans: list[Plan[Tensor]] = []

    def keep(plan: Plan[Tensor]) -> Tensor:
        plans.append(plan)
        return plan.result

    use_kernels("triton")
    backend = PagedAttentionBackend.__new__(PagedAttentionBackend)
    q, pool, table = meta(5, 8, 64), meta(1000, 2, 64), meta(16, 4096, dtype=torch.int32)
    rows, lengths = meta(5, dtype=torch.int64), meta(5, dtype=torch.int64)
    with mock.patch.object(Plan, "run", keep):
        out = backend._run_sdpa_forward_decode(q, meta(5, 8, 64), pool, pool, table, rows, lengths, scaling=0.125)
        assert out.shape == q.shape
        for name, tensor in (("table_ptr", table), ("rows_ptr", rows), ("kv_len_ptr", lengths)):
            assert plans[0].arguments[name] is tensor, name
        assert plans[0].grid[:2] == (5, 2)
        print("DECODES", flush=True)
        try:
            backend._run_sdpa_forward_extend(q, out, pool, pool, table, rows, *[lengths] * 3, scaling=0.125)
        except (RuntimeError, NotImplementedError) as error:  # torch's words about values that a meta tensor lacks
            print("READS" if "meta tensor" in str(error) else error)


if __name__ == "__main__":
    main()
