"""Replaces SGLang's `Sampler.forward`: seeded draws and log-probs that do not depend on the batch.

The uniform of a token is a hash of (request seed, position), so the same request draws the same tokens alone, in any
batch, after a retraction and after an engine restart. The reported log-prob is that of the full vocabulary after
temperature, whatever top-p and top-k cut away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_megatron import ops

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 seeds [B], positions [B] -> fp64 in [0, 1): splitmix64 (Steele, Lea, Flood 2014), top 53 bits."""
    x = seeds.long() + (positions.long() + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def sample_tokens(
    self: Any,
    logits_output: Any,
    sampling_info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
    positions: Tensor,
    **unsupported: Any,
) -> Tensor:
    """Sets `logits_output.next_token_logprobs` and returns token ids [B] int32."""
    if any(value is not None for value in unsupported.values()) or sampling_info.need_min_p_sampling:
        raise NotImplementedError("watermarks and min-p; rule: temperature, top-p, top-k; fix: leave them unset")
    if any(top_logprobs_nums or []) or any(ids for ids in token_ids_logprobs or []):
        raise NotImplementedError("top or chosen-token log-probs; rule: the sampled token's only")
    logits = logits_output.next_token_logits.float()
    if not bool(torch.isfinite(logits).all()):
        raise FloatingPointError("non-finite logits in the engine: a weight or activation is NaN or Inf")
    # Greedy requests arrive as temperature 1, top_k 1: their log-probs are untempered.
    tempered = torch.div(logits, sampling_info.temperatures)
    if sampling_info.is_all_greedy:
        ids = torch.argmax(tempered, -1)
    else:
        draws = uniforms(sampling_info.sampling_seed, positions)
        ids = ops.sample(tempered, draws, sampling_info.top_ps, sampling_info.top_ks)
    if return_logprob:
        logits_output.next_token_logprobs = ops.logprob(tempered, ids, 1.0)
    return ids.to(torch.int32)
