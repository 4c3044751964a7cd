"""Are two checkpoints equal? Tensor by tensor over their Hugging Face names, and by the logits that they give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from jetrl_megatron.fp8 import BLOCK, E4M3, dequantize
from jetrl_megatron.weights.convert.source import Source

# E4M3 has 3 bits after the leading one: half a step is at most 2^-4 of a normal number and 2^-10 scales of a subnormal
# one. A bf16 result adds 2^-9 of itself.
RELATIVE = 2.0**-4 + 2.0**-8
OF_SCALE = 2.0**-10
TOLERANCE = f"|a - b| <= {RELATIVE:.4f} |b| + 2^-10 scale"
NUM_PROMPTS, PROMPT_TOKENS = 4, 32


@dataclass(frozen=True)
class Stored:
    """An HF tensor as stored. scale: its block scales [ceil(N/128), ceil(K/128)] if `data` is E4M3."""

    data: Tensor
    scale: Tensor | None = None

    @property
    def kind(self) -> str:
        return str(self.data.dtype).removeprefix("torch.")


class Tensors(Protocol):
    """A checkpoint of any format, seen as Hugging Face tensors."""

    def names(self) -> list[str]: ...

    def stored(self, name: str) -> Stored: ...


class HfTensorsOf:
    """A Hugging Face folder. Raises ValueError if it is not whole."""

    def __init__(self, path: Path) -> None:
        self.source = Source(path)

    def names(self) -> list[str]:
        return list(self.source.weights)

    def stored(self, name: str) -> Stored:
        weight = self.source.weights[name]
        return Stored(weight.span.whole(), None if weight.scale is None else weight.block_scale())


@dataclass(frozen=True)
class Difference:
    """max_abs: largest |a - b| of the values; num: elements that differ (exact) or lie outside the tolerance."""

    name: str
    what: str
    num: int = 0
    max_abs: float = 0.0


def differences(a: Tensors, b: Tensors) -> Iterator[Difference]:
    """What differs. Tensors of one kind must have the same bits (FP8: codes and scales); FP8 against another precision
    is compared dequantized, within TOLERANCE; BF16 against FP32 by value."""
    ours, theirs = a.names(), set(b.names())
    for name in sorted(theirs - set(ours)):
        yield Difference(name, "only in B")
    for name in ours:
        if name not in theirs:
            yield Difference(name, "only in A")
            continue
        found = _compare(name, a.stored(name), b.stored(name))
        if found is not None:
            yield found


def _compare(name: str, a: Stored, b: Stored) -> Difference | None:
    if a.data.shape != b.data.shape:
        return Difference(name, f"shape {list(a.data.shape)} and {list(b.data.shape)}")
    if a.kind == b.kind:
        same_scale = a.scale is None or b.scale is None or torch.equal(_bits(a.scale), _bits(b.scale))
        if same_scale and torch.equal(_bits(a.data), _bits(b.data)):
            return None
    x, y = _values(a), _values(b)
    gap = (x - y).abs()
    allowed: Tensor | float = 0.0
    if (a.scale is None) != (b.scale is None):
        scaled, exact = (a, y) if a.scale is not None else (b, x)
        allowed = RELATIVE * exact.abs() + OF_SCALE * _element_scale(scaled)
    wrong = ~(gap <= allowed)  # NaN is wrong
    if a.kind == b.kind:
        wrong |= _bits(a.data).view(*x.shape, -1).ne(_bits(b.data).view(*x.shape, -1)).any(-1)
    num = int(wrong.sum())
    kinds = a.kind if a.kind == b.kind else f"{a.kind} and {b.kind}"
    if not num and a.kind != b.kind:
        return None
    return Difference(name, kinds, num, float(gap.nan_to_num(torch.inf).max()))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _values(stored: Stored) -> Tensor:
    if stored.scale is None:
        return stored.data.float()
    return dequantize(stored.data, stored.scale, BLOCK, torch.float32)


def _element_scale(stored: Stored) -> Tensor:
    assert stored.data.dtype == E4M3
    assert stored.scale is not None
    rows, cols = stored.data.shape
    return stored.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]


@dataclass(frozen=True)
class LogitsReport:
    """transformers' fp32 logits of both on the same random prompts. top1: share of positions with the same argmax; kl:
    mean KL(A || B) in nats per position."""

    max_abs: float
    top1: float
    kl: float


def compare_logits(a: Tensors, b: Tensors, config: Mapping[str, Any]) -> LogitsReport:
    """Both checkpoints with the config.json of A, dequantized, on NUM_PROMPTS random prompts."""
    vocab_size = int(config["vocab_size"])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator)
    x, y = (_logits(tensors, config, ids) for tensors in (a, b))
    log_p, log_q = x.log_softmax(-1), y.log_softmax(-1)
    kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    return LogitsReport(float((x - y).abs().max()), float((x.argmax(-1) == y.argmax(-1)).float().mean()), kl)


def _logits(tensors: Tensors, config: Mapping[str, Any], ids: Tensor) -> Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    loaded = AutoConfig.for_model(config["model_type"], **plain)
    model = AutoModelForCausalLM.from_config(loaded, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in tensors.names():
            _assign(parameters, name, _values(tensors.stored(name)))
        logits: Tensor = model(ids).logits
    return logits


def _assign(parameters: Mapping[str, Tensor], name: str, value: Tensor) -> None:
    """Fill a parameter of transformers' model, which stacks experts (gate rows over up rows)."""
    if name in parameters:
        parameters[name].copy_(value)
        return
    prefix, expert, projection, _ = name.rsplit(".", 3)
    stacked = "down_proj" if projection == "down_proj" else "gate_up_proj"
    held = parameters[f"{prefix}.{stacked}"][int(expert)]
    half = held.shape[0] // 2
    rows = {"gate_proj": held[:half], "up_proj": held[half:], "down_proj": held}
    rows[projection].copy_(value)


def report(found: list[Difference], num_tensors: int, logits: LogitsReport | None) -> dict[str, Any]:
    """What `verify.py --json` prints."""
    return {
        "equal": not found,
        "num_tensors": num_tensors,
        "tolerance_fp8_against_others": TOLERANCE,
        "differences": [asdict(difference) for difference in found],
        "logits": None if logits is None else asdict(logits),
    }


def lines(found: Mapping[str, Any], limit: int = 20) -> list[str]:
    """The report as text."""
    out = [
        f"{item['name']}: {item['what']}"
        + (f", {item['num']} differ, max {item['max_abs']:.3g}" if item["num"] else "")
        for item in found["differences"][:limit]
    ]
    if len(found["differences"]) > limit:
        out.append(f"... and {len(found['differences']) - limit} more")
    if found["logits"] is not None:
        logits = found["logits"]
        out.append(
            f"logits: max |a - b| {logits['max_abs']:.3g}, same top-1 {logits['top1']:.3f}, KL {logits['kl']:.3g}"
        )
    out.append(f"{'equal' if found['equal'] else 'DIFFERENT'}: {found['num_tensors']} tensors")
    return out
