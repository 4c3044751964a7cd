"""Attention backend `jetrl`: chunked prefill and decode read SGLang's paged KV pool through one exact kernel."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from jetrl_megatron import ops


class PagedAttentionBackend(TorchNativeAttnBackend):
    """Writing the pool and the metadata stay SGLang's; only the two attention kernels are replaced.

    A CUDA graph of decode needs no metadata of ours: it reads the request table, and the runner's own buffers of rows
    and lengths."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None: ...

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padding attends the one key of SGLang's dummy slot."""
        return 1

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Every layer reads the request table, until a forward or a replay has ended."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        **options: Any,
    ) -> Tensor:
        """query [T, H, D] holds the new tokens of every sequence; each sees its prefix and itself."""
        assert scaling is not None
        _require_plain(options)
        new = extend_seq_lens.tolist()
        spans = [torch.arange(p + 1, p + n + 1) for p, n in zip(extend_prefix_lens.tolist(), new, strict=True)]
        kv_len = torch.cat(spans).to(query.device)
        cu = [0, *accumulate(new)]
        attended = ops.paged_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, cu, kv_len, scaling)
        return output.copy_(attended)

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        **options: Any,
    ) -> Tensor:
        """query [B, H, D]: one new token per sequence; nothing here is read by the host."""
        assert scaling is not None
        _require_plain(options)
        attended = ops.paged_attention(query, k_cache, v_cache, req_to_token, req_pool_indices, None, seq_lens, scaling)
        return output.copy_(attended)


def _require_plain(options: dict[str, Any]) -> None:
    if options.get("sliding_window_size") is not None or options.get("is_cross_attn"):
        raise NotImplementedError("sliding-window or cross attention; rule: plain causal attention")
