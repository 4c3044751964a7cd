"""Memory that carries the quantized form of what it holds.

An operator whose result an FP8 linear will read makes both from one pass (RMSNorm + quantize, SwiGLU + quantize) and
leaves the codes with the result; the linear uses what it finds there instead of quantizing again. The same bytes either
way, so a form that got lost costs time only.

The form belongs to the memory, not to the tensor object: it survives reshapes, `detach` and autograd's identities, and
serves runs of whole rows. It is void once something wrote in place. (Under `torch.inference_mode` torch does not count
writes; nothing may write between the two operators there.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from jetrl_megatron.fp8.format import Fp8Format, Fp8Tensor

_ATTRIBUTE = "jetrl_quantized"


class _Form(NamedTuple):
    quantized: Fp8Tensor
    first_element: int
    version: int


def carry(x: Tensor, quantized: Fp8Tensor) -> Tensor:
    """x [..., K], contiguous, in memory that carries its quantized form [M, K] (granularity `block`: no row's scales
    depend on the others)."""
    x = x.contiguous()
    assert quantized.format.granularity == "block"
    assert x.numel() == quantized.data.numel()
    memory: Any = x.untyped_storage()
    setattr(memory, _ATTRIBUTE, _Form(quantized, int(x.storage_offset()), _version(x)))
    return x


def carried(x: Tensor, fmt: Fp8Format) -> Fp8Tensor | None:
    """The quantized form of x [M, K] in this format, if its memory carries it."""
    form: _Form | None = getattr(x.untyped_storage(), _ATTRIBUTE, None)
    if form is None or form.quantized.format != fmt or form.version != _version(x) or not x.is_contiguous():
        return None
    num_rows, width = form.quantized.shape
    first_row, rest = divmod(int(x.storage_offset()) - form.first_element, max(width, 1))
    if rest or x.shape[1] != width or not 0 <= first_row <= num_rows - len(x):
        return None
    if len(x) == num_rows:
        return form.quantized
    rows = slice(first_row, first_row + len(x))
    return Fp8Tensor(form.quantized.data[rows], form.quantized.scale[rows], fmt)


def _version(x: Tensor) -> int:
    """Counts the writes to x's memory."""
    return -1 if x.is_inference() else x._version
