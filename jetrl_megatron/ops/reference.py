"""Reference kernels in plain torch: exact, so equal for any batch, padding, thread count and BLAS.

Two rules make that true (docs/numerics.md, section 5): non-reductions use only IEEE + - * / sqrt, comparisons, rounding
and bit operations; reductions are a fixed binary tree of fp32 adds, or sums of integers held in fp64 that cannot
round. This module is one set of kernels behind `ops`; every other set must give the same bits. The backward of
attention is torch's; there is no other autograd here.
Shape letters: T tokens, H hidden, D head dim, N rows of a weight, K contracted dim, V vocabulary, P slots of a
key/value pool, B sequences, R rows of a table of requests, L keys, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_megatron.fp8 import Fp8Format, Fp8Tensor, quantize_rows
from jetrl_megatron.ops.autograd import attention_backward as attention_backward

F32, F64, I64 = torch.float32, torch.float64, torch.int64
MAX_EXACT_K = 8192  # 20 + 20 + log2(8192) = 53 bits
_MAX_SCORES = 1 << 22  # elements of one attention work item, bounds memory
_QUERY_CHUNK = 128
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


# ------------------------------------------------------------------------------------------------ building blocks
def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dim by halving: x[..., :p/2] + x[..., p/2:], zero padded to a power of two."""
    n = x.shape[-1]
    p = 1 << (n - 1).bit_length()
    if p != n:
        x = torch.nn.functional.pad(x, (0, p - n))
    while p > 1:
        p //= 2
        x = x[..., :p] + x[..., p:]
    return x[..., 0]


def sqrt32(x: Tensor) -> Tensor:
    """Correctly rounded square root of fp32 x, which `torch.sqrt` is not on every CPU (vector math libraries).

    The root of a 24-bit number is at least 2^-51 (relative) away from any midpoint of two fp32 values, so an fp64 root
    with an error below 2^-52 rounds to the right one."""
    return torch.sqrt(x.double()).float()


def exp32(x: Tensor) -> Tensor:
    """exp of fp32 x, clamped to +-87: cephes polynomial, every mul and add rounded on its own."""
    x = x.clamp(-87.0, 87.0)
    k = (x * 1.44269504088896341).round_()
    x = x - k * 0.693359375
    x.sub_(k * -2.12194440e-4)
    y = x * _EXP_COEFFICIENTS[0]
    for coefficient in _EXP_COEFFICIENTS[1:]:
        y.add_(coefficient).mul_(x)
    y = y.mul_(x).add_(x).add_(1.0)
    return y.mul_(k.to(torch.int32).add_(127).bitwise_left_shift_(23).view(F32))


def log64(s: Tensor) -> Tensor:
    """log of positive fp32 s as fp64: atanh series to the 23rd power."""
    mantissa, exponent = torch.frexp(s.double())
    low = mantissa < 0.70710678118654752
    mantissa = torch.where(low, mantissa * 2, mantissa)
    e = (exponent - low.to(exponent.dtype)).double()
    f = (mantissa - 1) / (mantissa + 1)
    f2 = f * f
    y = torch.full_like(f, 1 / 23.0)
    for d in range(21, 0, -2):
        y = y * f2 + (1.0 / d)
    return y * f * 2 + e * 0.6931471805599453


def _pow2(exponent: Tensor) -> Tensor:
    return (exponent.to(I64) + 1023).bitwise_left_shift(52).view(F64)


def _exponent(magnitude: Tensor) -> Tensor:
    """e with 2^(e-1) <= magnitude < 2^e."""
    return torch.frexp(magnitude.clamp_min(1e-30))[1]


def row_max(x: Tensor) -> Tensor:
    """max |row| of x [..., K] as fp64 [..., 1]; NaN where a row has one."""
    return x.abs().amax(-1, keepdim=True).double()


def grid(x: Tensor, bits: int, row_max: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows of x as fp64 integers of `bits` bits and the fp64 scale [..., 1] that restores them: row = integers * scale.

    row_max: max |row| [..., 1] where the row is only a shard of a longer one.
    """
    wide = x.double()
    if row_max is None:
        row_max = wide.abs().amax(-1, keepdim=True)
    e = _exponent(row_max.double())
    return (wide * _pow2(bits - e)).round_(), _pow2(e - bits)


# ------------------------------------------------------------------------------------------------ elementwise and norms
def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] -> (x * 1/sqrt(mean(x^2) + eps)) * weight in fp32, rounded once to x's dtype."""
    wide = x.float()
    mean = tree_sum(wide * wide) * (1.0 / x.shape[-1])
    r = torch.reciprocal(sqrt32(mean + eps)).unsqueeze(-1)
    return ((wide * r) * weight.float()).to(x.dtype)


def rmsnorm_quantize(x: Tensor, weight: Tensor, eps: float, fmt: Fp8Format) -> tuple[Tensor, Fp8Tensor]:
    """`rmsnorm`, and its result as rows [M, H] quantized along H."""
    y = rmsnorm(x, weight, eps)
    return y, quantize_rows(y.reshape(-1, y.shape[-1]), fmt)


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, fmt: Fp8Format | None
) -> tuple[Tensor, Tensor, Fp8Tensor | None]:
    """(norm of x + residual rounded to their dtype, that sum, the norm quantized where there is a format)."""
    total = x + residual
    if fmt is None:
        return rmsnorm(total, weight, eps), total, None
    y, quantized = rmsnorm_quantize(total, weight, eps, fmt)
    return y, total, quantized


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, h, D] rotated by fp32 cos, sin [T, D/2] (half-split layout), rounded once."""
    a, b = x.float().chunk(2, -1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2F] = [gate | up] -> (gate * sigmoid(gate)) * up in fp32, rounded once; [..., F]."""
    gate, up = gate_up.float().chunk(2, -1)
    return ((gate * torch.reciprocal(exp32(-gate) + 1.0)) * up).to(gate_up.dtype)


def swiglu_quantize(gate_up: Tensor, fmt: Fp8Format) -> tuple[Tensor, Fp8Tensor]:
    """`swiglu`, and its result as rows [M, F] quantized along F."""
    y = swiglu(gate_up)
    return y, quantize_rows(y.reshape(-1, y.shape[-1]), fmt)


# ------------------------------------------------------------------------------------------------ exact bf16 linear
def prepare_linear(weight: Tensor, weight_max: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """weight [N, K] on 20-bit row grids: per chunk of 8192 columns (integers [K', N], scale [1, N]) in fp64; made once
    per weight version. weight_max: max |row| [N, 1] where K is split over ranks."""
    chunks = []
    for first in range(0, weight.shape[1], MAX_EXACT_K):
        integers, scale = grid(weight[:, first : first + MAX_EXACT_K], 20, weight_max)
        chunks.append((integers.t().contiguous(), scale.t()))
    return chunks


def linear_partial(x: Tensor, prepared: list[tuple[Tensor, Tensor]], x_max: Tensor | None = None) -> Tensor:
    """x [T, K] times the prepared weight as fp64 [T, N]: exact for K <= 8192; chunks added in ascending order beyond.
    x_max: max |row| [T, 1] where K is split over ranks."""
    total: Tensor | None = None
    for i, (integers, scale) in enumerate(prepared):
        xi, xs = grid(x[:, i * MAX_EXACT_K : (i + 1) * MAX_EXACT_K], 20, x_max)
        part = (xi @ integers).mul_(xs).mul_(scale)
        total = part if total is None else total + part
    assert total is not None
    return total


def linear(x: Tensor, prepared: list[tuple[Tensor, Tensor]]) -> Tensor:
    """x [T, K] times the prepared weight, rounded once to fp32 [T, N]."""
    return linear_partial(x, prepared).float()


def row_parallel_linear(
    x: Tensor,
    prepared: list[tuple[Tensor, Tensor]],
    maximum: Callable[[Tensor], Tensor],
    sum_fp64: Callable[[Tensor], Tensor],
) -> Tensor:
    """`linear` whose K is split over ranks: the row grids come from `maximum` over the group, the exact partial sums
    meet in `sum_fp64`, in any order."""
    return sum_fp64(linear_partial(x, prepared, maximum(row_max(x)))).float()


def prepare_experts(weight: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """Each of the stacked weights [E, N, K] prepared."""
    return [prepare_linear(expert) for expert in weight]


def routed_linear(x: Tensor, prepared: list[list[tuple[Tensor, Tensor]]], offsets: Tensor) -> Tensor:
    """`linear` with one weight per group: x [R, K], rows of group e at offsets[e] to offsets[e + 1] -> fp32 [R, N],
    zero in rows of no group."""
    return by_group(linear, x, prepared, offsets)


def by_group(linear: Callable[[Tensor, Any], Tensor], x: Tensor, prepared: Sequence[Any], offsets: Tensor) -> Tensor:
    """The kernel set's linear, group after group."""
    num_rows = offsets.diff().tolist()
    parts = x.split([*num_rows, len(x) - sum(num_rows)])
    found = [linear(rows, weight) for rows, weight in zip(parts[:-1], prepared, strict=True)]
    return torch.cat([*found, found[0].new_zeros(len(parts[-1]), found[0].shape[1])])


# ------------------------------------------------------------------------------------------------ attention
def attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    table: Tensor,
    rows: Tensor,
    cu_queries: Sequence[int] | None,
    kv_len: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention for packed training, chunked prefill and paged decode alike.

    q [T, H, D]; k_pool, v_pool [P, G, D] with G dividing H; table [R, L] of integers: the pool slots of R requests'
    keys; rows [B] of integers: the table's row of sequence b; cu_queries: B + 1 offsets of the sequences' queries in q,
    or None for decode: one query per sequence; kv_len [T] of integers: keys each query may see (its first kv_len keys).
    D <= 128, at most 65536 keys. Returns [T, H, D] in q's dtype. A query with kv_len 0 gives zeros.
    """
    out = torch.zeros_like(q)
    lengths = kv_len.tolist()
    offsets = range(len(q) + 1) if cu_queries is None else cu_queries
    for items in _work_groups(offsets, lengths, q.shape[1]):
        tq, tk = max(end - start for _, start, end in items), max(max(lengths[s:e]) for _, s, e in items)
        queries = [[min(start + i, end - 1) for i in range(tq)] for _, start, end in items]
        index = torch.tensor(queries, device=q.device)
        sequences = torch.tensor([b for b, _, _ in items], device=q.device)
        slots = table[rows[sequences], :tk].long()
        o = _attend(q[index], k_pool[slots], v_pool[slots], kv_len[index], scale)
        out[index] = o
    return out


def attention_forward(*inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`attention`, and what `attention_backward` wants to have kept: nothing here."""
    return attention(*inputs), ()


def _work_groups(cu: Sequence[int], lengths: list[int], heads: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut sequences into query chunks (sequence, first, last query) and group chunks of similar size."""
    chunks = [
        (b, start, min(start + _QUERY_CHUNK, cu[b + 1]))
        for b in range(len(cu) - 1)
        for start in range(cu[b], cu[b + 1], _QUERY_CHUNK)
    ]
    chunks = [c for c in chunks if max(lengths[c[1] : c[2]]) > 0]
    chunks.sort(key=lambda c: (max(lengths[c[1] : c[2]]), c[2] - c[1]))
    group: list[tuple[int, int, int]] = []
    for chunk in chunks:
        tq = max(end - start for _, start, end in [*group, chunk])
        tk = max(lengths[chunk[1] : chunk[2]])
        if group and (len(group) + 1) * tq * tk * heads > _MAX_SCORES:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _attend(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor, scale: float) -> Tensor:
    """q [B, Tq, H, D]; k, v [B, Tk, G, D]; kv_len [B, Tq]. Padding never changes bits: all sums are exact."""
    batch, tq, heads, dim = q.shape
    tk, groups = k.shape[1], k.shape[2]
    per_group = heads // groups
    qi, qs = grid(q, 22)
    ki, ks = grid(k, 22)
    qi = (qi * qs).view(batch, tq, groups, per_group, dim).permute(0, 2, 3, 1, 4).reshape(-1, per_group * tq, dim)
    ki = (ki * ks).permute(0, 2, 3, 1).reshape(batch * groups, dim, tk)
    s = torch.bmm(qi, ki).float().mul_(scale).view(batch, groups, per_group, tq, tk)
    hidden = (torch.arange(tk, device=q.device) >= kv_len[..., None]).view(batch, 1, 1, tq, tk)
    s.masked_fill_(hidden, float("-inf"))
    p = exp32(s.sub_(s.amax(-1, keepdim=True))).masked_fill_(hidden, 0.0).double()
    denominator = (p * 16777216.0).round_().sum(-1, keepdim=True)
    # v as 17-bit integers with an exponent per token, which is folded into p; then p on a 20-bit grid per row.
    ve = _exponent(v.double().abs().amax(-1))
    vi = (v.double() * _pow2(17 - ve)[..., None]).round_().permute(0, 2, 1, 3).reshape(batch * groups, tk, dim)
    p.mul_(_pow2(ve).permute(0, 2, 1).view(batch, groups, 1, 1, tk))
    pe = _exponent(p.amax(-1, keepdim=True))
    weights = p.mul_(_pow2(20 - pe)).round_().view(batch * groups, per_group * tq, tk)
    o = torch.bmm(weights, vi).view(batch, groups, per_group, tq, dim)
    o = o.mul_(_pow2(pe - 37)).div_(denominator * (1 / 16777216.0))
    return o.permute(0, 3, 1, 2, 4).reshape(batch, tq, heads, dim).float().to(q.dtype)


# ------------------------------------------------------------------------------------------------ mixture of experts
def top_experts(logits: Tensor, top_k: int) -> Tensor:
    """Router logits [T, E] fp32 -> expert ids [T, k] int64 in descending logit; of equal logits the lower id first."""
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top_k]


def expert_weights(logits: Tensor, experts: Tensor, renormalize: bool) -> Tensor:
    """Softmax of the router logits [T, E] at `experts` [T, k] (of `top_experts`), over the chosen experts
    (renormalize) or over all: fp32 [T, k]."""
    top = logits.gather(-1, experts[:, :1])
    chosen = exp32(logits.gather(-1, experts) - top)
    total = tree_sum(chosen if renormalize else exp32(logits - top))
    return chosen / total.unsqueeze(-1)


def moe_combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [T, k, H], weights [T, k] fp32 -> [T, H]: fp32 products, added left to right over k, rounded once."""
    wide = outputs.float()
    total = wide[:, 0] * weights[:, :1]
    for slot in range(1, outputs.shape[1]):
        total = total + wide[:, slot] * weights[:, slot : slot + 1]
    return total.to(outputs.dtype)


# ------------------------------------------------------------------------------------------------ log-probs, sampling
def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [T, V] fp32 (already divided by the temperature), targets [T] -> fp32 log-softmax at the targets."""
    top = logits.amax(-1, keepdim=True)
    log_sum = log64(tree_sum(exp32(logits - top)))
    chosen = (logits.gather(-1, targets.unsqueeze(-1)) - top).squeeze(-1)
    return (chosen.double() - log_sum).float()


def sample(logits: Tensor, uniforms: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Inverse-CDF draw, independent of the batch: logits [B, V] fp32 after temperature, uniforms [B] fp64 in [0, 1),
    top_p [B], top_k [B] (values >= V: off) -> token ids [B] int64.

    Probabilities are integers round(2^30 * exp(z - max)), so every cumulative sum is exact in fp64; a token below
    2^-31 of the top one is never drawn. Order of the tokens: ascending id where a row cuts nothing, else descending
    logit, lower id first; top-p keeps the fewest tokens that hold that share of the mass that top-k left.
    """
    weights = (exp32(logits - logits.amax(-1, keepdim=True)).double() * 2.0**30).round_()
    return draw(logits, weights, uniforms, top_p, top_k)


def draw(logits: Tensor, weights: Tensor, uniforms: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """`sample` from the integer weights [B, V] in fp64."""
    cut = (top_p < 1) | (top_k < logits.shape[-1])
    if not bool(cut.any()):
        return _inverse_cdf(weights, uniforms)
    ids = _sample_cut(logits[cut], weights[cut], uniforms[cut], top_p[cut], top_k[cut])
    if bool(cut.all()):
        return ids
    out = torch.empty(len(logits), dtype=I64, device=logits.device)
    out[cut], out[~cut] = ids, _inverse_cdf(weights[~cut], uniforms[~cut])
    return out


def _sample_cut(logits: Tensor, weights: Tensor, uniforms: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    weights = weights.gather(-1, order)
    keep = torch.arange(logits.shape[-1], device=logits.device).unsqueeze(0) < top_k.unsqueeze(-1)
    kept_mass = (weights * keep).sum(-1, keepdim=True)
    keep &= (weights.cumsum(-1) - weights) < kept_mass * top_p.double().unsqueeze(-1)
    keep[:, 0] = True
    slot = _inverse_cdf(weights * keep, uniforms)
    return order.gather(-1, slot.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First index whose cumulative integer weight exceeds floor(uniform * total)."""
    cumulative = weights.cumsum(-1)
    threshold = (uniforms * cumulative[:, -1]).floor()
    return torch.searchsorted(cumulative, threshold.unsqueeze(-1), right=True).squeeze(-1)
