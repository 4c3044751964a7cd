"""The compiled kernels: first their bits against our torch forms, then their time against stock torch.

Bits are compared on every instruction set of this processor, with 1 and 2 threads, on the outputs of every row of the
table; the exit status is 1 when one differs. Times: calls take turns, medians, 1 thread. `--quick` takes half a
minute: smaller shapes, 2 layers of the model. The model is SmolLM2-135M's shape with random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from support import write_results
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from jetrl_megatron import ops
from jetrl_megatron.fp8 import (
    BLOCK,
    E4M3,
    Fp8Format,
    Fp8Recipe,
    Fp8Weight,
    quantize_columns,
    quantize_rows,
    quantize_weight,
    whole,
)
from jetrl_megatron.native import LEVELS, native
from jetrl_megatron.native import tensors as compiled
from jetrl_megatron.ops.kernels import kernels, use_kernels

RECIPE = Fp8Recipe(Fp8Format())
HIDDEN, INTERMEDIATE, LAYERS, HEADS, GROUPS, DIM, VOCAB = 576, 1536, 30, 9, 3, 64, 49152
Run = Callable[[], Any]


@dataclass
class Case:
    """One row. make: our operator, prepared for the kernel set in use when it is called. stock: competitors by name,
    the first is the one of the ratio (time of ours / time of stock) and of the target `at_most`."""

    name: str
    make: Callable[[], Run]
    stock: dict[str, Run]
    at_most: float | None = None
    times_ms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        ours, theirs = (statistics.median(self.times_ms[name]) for name in ("ours", next(iter(self.stock))))
        return ours / theirs

    @property
    def met(self) -> bool:
        return self.at_most is None or self.ratio <= self.at_most

    def measure(self, budget_s: float) -> None:
        functions = {"ours": self.make(), **self.stock}
        self.times_ms = {name: [] for name in functions}
        for function in functions.values():
            function()
        end = time.perf_counter() + budget_s
        while time.perf_counter() < end or len(self.times_ms["ours"]) < 3:
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                self.times_ms[name].append((time.perf_counter() - start) * 1e3)


@contextlib.contextmanager
def torch_forms() -> Iterator[None]:
    use_kernels("reference")
    try:
        with mock.patch.object(compiled, "usable", return_value=False):
            yield
    finally:
        use_kernels("compiled")


def num_outputs_if_equal(case: Case) -> int | None:
    """Number of outputs compared, None if a bit differs on any instruction set or thread count."""
    with torch_forms():
        expected = case.make()()
    found = native()
    assert found is not None
    best, compared = int(found.library.jetrl_level()), 0
    try:
        for level in range(best + 1):
            found.library.jetrl_use_level(level)
            for threads in (1, 2):
                compiled.use_threads(threads)
                result = case.make()()
                compared += result.numel()
                if not torch.equal(result.view(torch.uint8), expected.view(torch.uint8)):
                    return None
    finally:
        found.library.jetrl_use_level(best)
        compiled.use_threads(1)
    return compared


# ------------------------------------------------------------------------------------------------ operators
def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).bfloat16()


def fp8_linear(m: int, at_most: float | None) -> Case:
    x, weight = randn(m, 1024), randn(1024, 1024) * 0.02
    x32, weight32 = x.float(), weight.float()

    def make() -> Run:
        fp8 = Fp8Weight.of(quantize_weight(weight, RECIPE.format), whole(1024))
        return lambda: ops.fp8_linear(x, weight, fp8, RECIPE)

    stock = {"fp32": lambda: F.linear(x32, weight32), "bf16": lambda: F.linear(x, weight)}
    return Case(f"FP8 linear 1024x1024, M={m}", make, stock, at_most)


def invariant_sum(m: int) -> Case:
    """The cost of `parallel.tp_invariant`: K in 4 segments that meet in a tree, against one chain."""
    x, weight = randn(m, 1024), randn(1024, 1024) * 0.02

    def make(segments: int = 4) -> Run:
        fp8 = Fp8Weight.of(quantize_weight(weight, RECIPE.format), whole(1024))
        return lambda: ops.fp8_linear(x, weight, fp8, RECIPE, segments)

    return Case(f"FP8 linear 1024x1024, M={m}, tp-invariant sum", make, {"one chain": make(1)})


def lm_head(m: int, at_most: float | None) -> Case:
    x, weight = randn(m, HIDDEN), randn(VOCAB, HIDDEN) * 0.02
    x32, weight32 = x.float(), weight.float()

    def make() -> Run:
        exact = ops.ExactWeight.of(weight)
        return lambda: ops.lm_head(x, weight, exact)

    stock = {"bf16": lambda: F.linear(x, weight), "fp32": lambda: F.linear(x32, weight32)}
    return Case(f"lm_head {VOCAB}x{HIDDEN}, M={m}", make, stock, at_most)


def decode_attention(longest: int) -> Case:
    lengths = torch.linspace(0.3 * longest, longest, 16).long()
    q, keys, values = (
        randn(int(n), h, DIM) for n, h in ((16, HEADS), (lengths.sum(), GROUPS), (lengths.sum(), GROUPS))
    )
    slots = torch.randperm(len(keys)).split(lengths.tolist())
    table = torch.nn.utils.rnn.pad_sequence(list(slots), batch_first=True).int()
    rows = torch.arange(16)

    def stock() -> None:
        for i, slot in enumerate(slots):  # what SGLang's torch_native backend does
            k, v = (pool[slot].transpose(0, 1)[None] for pool in (keys, values))
            F.scaled_dot_product_attention(q[i][None, :, None], k, v, scale=DIM**-0.5, enable_gqa=True)

    def make() -> Run:
        return lambda: ops.paged_attention(q, keys, values, table, rows, None, lengths, DIM**-0.5)

    return Case(f"attention, decode, 16 sequences of up to {longest} keys", make, {"bf16": stock}, 1.0)


def causal_attention(n: int) -> Case:
    q, k, v = randn(n, HEADS, DIM), randn(n, GROUPS, DIM), randn(n, GROUPS, DIM) * 2
    stock_qkv = [t.transpose(0, 1)[None] for t in (q, k, v)]
    stock = {"bf16": lambda: F.scaled_dot_product_attention(*stock_qkv, is_causal=True, enable_gqa=True)}
    return Case(f"attention, causal, {n}", lambda: lambda: ops.packed_attention(q, k, v, [0, n], DIM**-0.5), stock)


def rows(m: int) -> list[Case]:
    x, weight, gate_up = randn(m, HIDDEN), randn(HIDDEN), randn(m, 2 * INTERMEDIATE)
    gate, up = gate_up.chunk(2, -1)
    fmt = RECIPE.format
    return [
        Case(
            f"RMSNorm + quantize {m}x{HIDDEN}",
            lambda: lambda: kernels().rmsnorm_quantize(x, weight, 1e-5, fmt)[1].data,
            {"one after the other": lambda: quantize_rows(kernels().rmsnorm(x, weight, 1e-5), fmt)},
        ),
        Case(
            f"SwiGLU + quantize {m}x{INTERMEDIATE}",
            lambda: lambda: kernels().swiglu_quantize(gate_up, fmt)[1].data,
            {"one after the other": lambda: quantize_rows(kernels().swiglu(gate_up), fmt)},
        ),
        Case(
            f"RMSNorm {m}x{HIDDEN}",
            lambda: lambda: ops.rmsnorm(x, weight, 1e-5),
            {"bf16": lambda: F.rms_norm(x, (HIDDEN,), weight, 1e-5)},
        ),
        Case(f"SwiGLU {m}x{INTERMEDIATE}", lambda: lambda: ops.swiglu(gate_up), {"bf16": lambda: F.silu(gate) * up}),
        Case(
            f"quantize along tokens {m}x{HIDDEN}",
            lambda: lambda: quantize_columns(x, RECIPE.format).data,
            {"torch, 1x128 loop": lambda: torch_cast(x.t().contiguous(), 1)},
        ),
    ]


def torch_cast(x: Tensor, rows_per_block: int) -> Tensor:
    """The usual converter's cast in plain torch: pad, view as blocks, amax, divide, cast."""
    m, k = x.shape
    padded = torch.zeros(-(-m // rows_per_block) * rows_per_block, -(-k // BLOCK) * BLOCK)
    padded[:m, :k] = x
    blocks = padded.view(-1, rows_per_block, padded.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    return (blocks / scale).to(E4M3).view_as(padded)[:m, :k].contiguous()


def weight_quantizers(n: int) -> list[Case]:
    weight = randn(n, n) * 0.02
    copy = torch.empty_like(weight)

    def make() -> Run:
        return lambda: quantize_weight(weight, RECIPE.format).data

    return [
        Case(f"quantize weight {n}x{n}", make, {"torch, 128x128 loop": lambda: torch_cast(weight, BLOCK)}, 1 / 3),
        Case(f"quantize weight {n}x{n} / memcpy", make, {"memcpy": lambda: copy.copy_(weight)}, 1 / 0.4),
    ]


# ------------------------------------------------------------------------------------------------ model
class OperatorLlama:
    """Our operators in the order in which both Megatron's and SGLang's modules call them, over one paged KV cache."""

    def __init__(self, stock: Any, num_slots: int) -> None:
        self.layers = []
        for layer in stock.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            fused = [qkv, [attention.o_proj.weight], [mlp.gate_proj.weight, mlp.up_proj.weight], [mlp.down_proj.weight]]
            weights = [self._quantized(torch.cat(list(parts))) for parts in fused]
            norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
            pools = (randn(num_slots, GROUPS, DIM), randn(num_slots, GROUPS, DIM) * 2)
            self.layers.append((norms, weights, pools))
        self.embedding, self.norm = stock.model.embed_tokens.weight, stock.model.norm.weight
        self.head = ops.ExactWeight.of(self.embedding)
        self.rope = ops.RopeTable(10000.0, DIM, 8192)

    @staticmethod
    def _quantized(weight: Tensor) -> tuple[Tensor, Fp8Weight]:
        return weight, Fp8Weight.of(quantize_weight(weight, RECIPE.format), whole(len(weight)))

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        offsets: list[int] | None,
        kv_len: Tensor,
    ) -> Tensor:
        """ids, positions, slots, kv_len [T], a row of the table per sequence; the rest as in `ops.paged_attention`;
        logits [T, V]."""
        fmt = RECIPE.format  # norm and SwiGLU leave their results quantized for the linears
        rows = torch.arange(len(table))
        residual = ops.embedding(ids, self.embedding)
        x = None
        for (norm1, norm2), (qkv, out, gate_up, down), (k_pool, v_pool) in self.layers:
            if x is None:
                x = ops.rmsnorm(residual, norm1, 1e-5, fmt)
            else:
                x, residual = ops.add_rmsnorm(x, residual, norm1, 1e-5, fmt)
            heads = ops.fp8_linear(x, *qkv, RECIPE).view(len(ids), -1, DIM)
            q, k = (ops.rope(t, positions, self.rope) for t in (heads[:, :HEADS], heads[:, HEADS : HEADS + GROUPS]))
            k_pool[slots], v_pool[slots] = k, heads[:, HEADS + GROUPS :]
            attended = ops.paged_attention(q, k_pool, v_pool, table, rows, offsets, kv_len, DIM**-0.5)
            x = ops.fp8_linear(attended.reshape(len(ids), -1), *out, RECIPE)
            x, residual = ops.add_rmsnorm(x, residual, norm2, 1e-5, fmt)
            x = ops.fp8_linear(ops.swiglu(ops.fp8_linear(x, *gate_up, RECIPE), fmt), *down, RECIPE)
        x, _ = ops.add_rmsnorm(x, residual, self.norm, 1e-5)
        return ops.lm_head(x, self.embedding, self.head)


def stock_llama(num_layers: int) -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=num_layers, head_dim=DIM,
        num_attention_heads=HEADS, num_key_value_heads=GROUPS, vocab_size=VOCAB, rope_theta=10000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def model_forward(stock: Any, batch: int, length: int) -> Case:
    """Log-probs of packed training sequences."""
    count = batch * length
    ids = torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    positions = torch.arange(length).repeat(batch)
    slots = torch.arange(count)
    shape = (slots, slots.view(batch, length).int(), list(range(0, count + 1, length)), positions + 1)

    def make() -> Run:
        model = OperatorLlama(stock, count)

        def run() -> Tensor:
            return ops.logprob(model.logits(ids.view(-1), positions, *shape), targets.reshape(-1), 1.0)

        return run

    wide = AutoModelForCausalLM.from_config(stock.config, dtype=torch.float32)
    wide.load_state_dict(stock.state_dict())

    def forward() -> Tensor:
        return torch.log_softmax(wide(ids, use_cache=False).logits, -1).gather(-1, targets[..., None])

    return Case(f"model, forward {batch}x{length}", make, {"fp32": forward}, 1 / 0.45)


def model_decode(stock: Any, batch: int, context: int) -> Case:
    """One decoding step of sequences with `context` cached tokens."""
    ids = torch.arange(batch) + 100
    positions = torch.full((batch,), context)
    table = torch.randperm(batch * (context + 1), generator=torch.Generator().manual_seed(0)).view(batch, -1)
    shape = (table[:, -1], table.int(), None, positions + 1)

    def make() -> Run:
        model = OperatorLlama(stock, table.numel())
        return lambda: model.logits(ids, positions, *shape)

    cache = DynamicCache(config=stock.config)
    for layer in range(stock.config.num_hidden_layers):
        cache.update(*(torch.randn(batch, GROUPS, context, DIM).bfloat16() for _ in range(2)), layer)

    def decode() -> None:
        stock(ids[:, None], past_key_values=cache, position_ids=positions[:, None])
        cache.crop(context)

    return Case(f"model, decode, batch {batch}, context {context}", make, {"bf16": decode}, 1.0)


def cases(quick: bool) -> list[Case]:
    stock = stock_llama(2 if quick else LAYERS)
    found = [fp8_linear(1, 1.4), fp8_linear(16, None)]
    found += [fp8_linear(m, 2.3) for m in ((32, 256) if quick else (32, 64, 256, 512))]
    found += [invariant_sum(256), lm_head(1, 1.0)] + [lm_head(m, None) for m in (() if quick else (8, 16, 128))]
    found += [decode_attention(1000)] + [causal_attention(n) for n in ((512,) if quick else (512, 2048))]
    found += [*rows(256 if quick else 2048), *weight_quantizers(4096)]
    found += [model_forward(stock, 2 if quick else 4, 128 if quick else 512)]
    return found + [model_decode(stock, batch, 256) for batch in (1, 16)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small form of half a minute; writes no results")
    parser.add_argument("--seconds", type=float, help="time per row (default 3, quick 0.5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    found = native()
    if found is None:
        sys.exit("cpu_kernels: the compiled kernels are not in use; see `jetrl doctor`")
    table = Table(
        "operator", "ours (ms)", "stock (ms)", "ours / stock", "target", "bits", title=f"kernels: {found.level}"
    )
    results, different, compared = [], [], 0
    with torch.no_grad():
        for case in cases(args.quick):
            equal = num_outputs_if_equal(case)
            compared += equal or 0
            different += [case.name] if equal is None else []
            case.measure(args.seconds or (0.5 if args.quick else 3.0))
            medians = {name: round(statistics.median(values), 4) for name, values in case.times_ms.items()}
            first, *others = ((name, ms) for name, ms in medians.items() if name != "ours")
            target = "" if case.at_most is None else f"<= {case.at_most:.2f} {'met' if case.met else 'MISSED'}"
            table.add_row(
                case.name,
                f"{medians['ours']:.3f}",
                "; ".join(f"{name} {ms:.3f}" for name, ms in (first, *others)),
                f"{case.ratio:.2f} of {first[0]}",
                target,
                "equal" if equal else "DIFFERENT",
            )
            row = {"case": case.name, "ratio": round(case.ratio, 3), "rounds": len(case.times_ms["ours"])}
            results.append(row | {"at_most": case.at_most, "met": case.met, "median_ms": medians})
    console.print(table)
    levels = ", ".join(LEVELS[: int(found.library.jetrl_level()) + 1])
    console.print(f"{compared:,} outputs compared with the torch forms on {levels}, 1 and 2 threads")
    if not args.quick:
        write_results("cpu_kernels", {"outputs_compared": compared, "different": different, "rows": results})
    if different:
        sys.exit(f"cpu_kernels: bits differ: {', '.join(different)}")


if __name__ == "__main__":
    main()
