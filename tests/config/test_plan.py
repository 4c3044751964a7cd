"""Claims about block alignment and layouts, against the dims of public models (numerics contract, section 4)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron.config import ModelDims, RunConfig, check_model, plan_rows
from jetrl_megatron.config.plan import layer_linears, num_segments, shard

# model -> (model_type, hidden, intermediate, layers, q heads, kv heads, head_dim, vocab, tied)
MODELS: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True),
    "Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
    "Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "Qwen3-4B": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "Qwen3-14B": ("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False),
    "Qwen3-32B": ("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
}
TPS = (1, 2, 4, 8, 16)


def dims_of(name: str) -> ModelDims:
    kind, hidden, inter, layers, heads, kv_heads, head_dim, vocab, tied = MODELS[name]
    return ModelDims.from_hf(
        {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": inter,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 32768,
        }
    )


def config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


def at_tp(
    train: int, engine: int | None = None, invariant: bool | None = False, **sections: dict[str, Any]
) -> RunConfig:
    engine = train if engine is None else engine
    return config(
        parallel={"tensor": train, "tp_invariant": invariant}, rollout={"tensor_parallel": engine}, **sections
    )


def lines(cfg: RunConfig, dims: ModelDims) -> list[str]:
    return [str(v) for v in check_model(cfg, dims)]


def test_public_shapes_that_cut_blocks_and_those_that_do_not() -> None:
    """The list of the numerics contract: largest TP whose FP8 blocks are whole, heads permitting, without segments."""
    largest = {name: [tp for tp in TPS if not check_model(at_tp(tp), dims_of(name))] for name in MODELS}
    assert largest == {
        "SmolLM2-135M": [1],
        "Qwen2.5-0.5B": [1],
        "Qwen2.5-7B": [1, 2, 4],
        "Qwen2.5-14B": [1, 2, 4],
        "Qwen2.5-32B": [1, 2, 4, 8],
        "Qwen3-0.6B": [1, 2, 4, 8],
        "Qwen3-4B": [1, 2, 4],
        "Qwen3-8B": [1, 2, 4, 8],
        "Qwen3-14B": [1, 2, 4, 8],
        "Qwen3-32B": [1, 2, 4, 8],
        "Llama-3.1-8B": [1, 2, 4, 8],
    }


@pytest.mark.parametrize(
    ("name", "tp", "tensor", "k_per_rank"),
    [
        ("Qwen2.5-7B", 8, "mlp.down_proj [3584, 18944]", 2368),
        ("Qwen2.5-14B", 8, "mlp.down_proj [5120, 13824]", 1728),
        ("Qwen2.5-32B", 16, "mlp.down_proj [5120, 27648]", 1728),
        ("Qwen3-4B", 8, "mlp.down_proj [2560, 9728]", 1216),
        ("SmolLM2-135M", 3, "self_attn.o_proj [576, 576]", 192),
        ("Qwen2.5-0.5B", 2, "self_attn.o_proj [896, 896]", 448),
    ],
)
def test_a_cut_activation_block_names_tensor_dims_and_working_sizes(
    name: str, tp: int, tensor: str, k_per_rank: int
) -> None:
    found = [line for line in lines(at_tp(tp), dims_of(name)) if "cuts an activation block" in line]
    assert any(line.startswith(f"parallel.tensor: {tp} with {tensor}") and str(k_per_rank) in line for line in found)
    assert any(line.startswith(f"rollout.tensor_parallel: {tp} with {tensor}") for line in found)
    working = [t for t in TPS if not check_model(at_tp(t), dims_of(name))]
    assert all(
        f"TP sizes that work: {', '.join(map(str, working))};" in line for line in found if "parallel.tensor" in line
    )


def test_tp_invariant_sums_stop_at_four() -> None:
    """Qwen3-8B is clean to TP 8, but the fixed tree has four segments: TP 8 needs tp_invariant=false."""
    dims = dims_of("Qwen3-8B")
    assert not check_model(at_tp(8, invariant=False), dims)
    for tp in (1, 2, 4):
        assert not check_model(at_tp(tp, invariant=True), dims)
    found = lines(at_tp(8, invariant=True), dims)
    assert len(found) == 4  # o and down, both sides
    assert all("4 segments" in f and "TP sizes that work: 1, 2, 4;" in f and "tp_invariant=false" in f for f in found)


def test_null_tp_invariant_follows_the_backend() -> None:
    dims, cfg = dims_of("Qwen3-8B"), at_tp(8, invariant=None)
    assert check_model(cfg, dims, emulated=True)
    assert not check_model(cfg, dims, emulated=False)


def test_gpu_backends_refuse_what_only_the_emulated_one_has() -> None:
    """Sums in segments, in BF16 too, and FP8 scales other than blocks: refused before a run starts."""
    dims, cfg = dims_of("Qwen3-8B"), at_tp(1, invariant=True)
    assert not check_model(cfg, dims, emulated=True)
    (found,) = check_model(cfg, dims, emulated=False)
    assert (found.key, found.value) == ("parallel.tp_invariant", "true")
    per_row = cfg.precision.model_copy(update={"granularity": "channel"})
    keys = [f.key for f in check_model(cfg.model_copy(update={"precision": per_row}), dims, emulated=False)]
    assert keys[:2] == ["precision.granularity", "parallel.tp_invariant"]
    bf16 = cfg.precision.model_copy(update={"train": "bf16", "rollout": "bf16"})
    (found,) = check_model(cfg.model_copy(update={"precision": bf16}), dims, emulated=False)
    assert found.key == "parallel.tp_invariant"
    per_row = bf16.model_copy(update={"granularity": "channel"})
    assert not check_model(at_tp(1, invariant=False).model_copy(update={"precision": per_row}), dims, emulated=False)


@pytest.mark.parametrize(("k", "segments"), [(512, 4), (576, 1), (256, 2), (384, 1), (768, 2), (896, 1), (18944, 4)])
def test_segments_divide_the_block_count(k: int, segments: int) -> None:
    assert num_segments(k) == segments


def test_unequal_tp_needs_invariant_sums_when_exactness_is_required() -> None:
    dims = dims_of("Qwen3-8B")
    assert not check_model(at_tp(4, 2, invariant=True), dims)
    (line,) = lines(at_tp(4, 2, invariant=False), dims)
    assert line.startswith("parallel.tensor: 4 with rollout.tensor_parallel=2; rule: mismatch.require_exact")
    assert not check_model(at_tp(4, 2, invariant=False, mismatch={"require_exact": False}), dims)


def test_shard_local_lifts_the_refusal_only_at_equal_tp() -> None:
    dims, local = dims_of("Qwen3-4B"), {"misaligned": "shard_local"}
    assert not check_model(at_tp(8, precision=local), dims)
    assert any("one TP size on both sides" in line for line in lines(at_tp(8, 4, precision=local), dims))
    assert any("tp_invariant=false" in line for line in lines(at_tp(8, invariant=True, precision=local), dims))


def test_bf16_sides_have_no_block_rules() -> None:
    """Qwen3-4B at TP 8 is refused for the FP8 side only; heads still must divide."""
    dims, relaxed = dims_of("Qwen3-4B"), {"require_exact": False}
    both = at_tp(8, precision={"train": "bf16", "rollout": "bf16"})
    assert not check_model(both, dims)
    found = lines(at_tp(8, precision={"train": "bf16", "rollout": "fp8"}, mismatch=relaxed), dims)
    assert found
    assert all(line.startswith("rollout.tensor_parallel") for line in found)


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_unblocked_granularity_is_refused_beyond_tp_1(granularity: str) -> None:
    dims = dims_of("Qwen3-8B")
    extra: dict[str, dict[str, Any]] = {
        "precision": {"granularity": granularity}, "mismatch": {"require_exact": False},
        "algorithm": {"recompute_old_logprobs": True},
    }  # fmt: skip
    assert not check_model(at_tp(1, **extra), dims)
    assert len([x for x in lines(at_tp(2, **extra), dims) if f"granularity={granularity}" in x]) == 2


def test_engine_may_replicate_kv_heads_and_training_may_not() -> None:
    """Qwen3-8B has 8 kv heads: TP 16 is possible in the engine (each kv head twice), not in training."""
    dims = dims_of("Qwen3-8B")
    cfg = at_tp(16, precision={"train": "bf16", "rollout": "bf16"})
    assert [line.split(":")[0] for line in lines(cfg, dims)] == ["parallel.tensor"]
    rows = {row.linear.name: row for row in plan_rows(cfg, dims)}
    assert (rows["self_attn.k_proj"].engine.n, rows["self_attn.k_proj"].engine.divides) == (128, True)


def test_remaining_layout_rules() -> None:
    dims = dims_of("Qwen3-8B")
    assert lines(config(parallel={"pipeline": 5}), dims)[0].startswith(
        "parallel.pipeline: 5; rule: divides num_layers (36)"
    )
    (line,) = lines(config(parallel={"pipeline": 4, "virtual_pipeline": 2}), dims)
    assert line.startswith("parallel.virtual_pipeline: 2; rule: divides the layers of a pipeline stage (36 / 4 = 9)")
    assert line.endswith("fix: use one of [1, 3, 9]")
    assert not lines(config(parallel={"pipeline": 2, "virtual_pipeline": 2}), _with(dims, num_layers=4))
    assert "dense model" in lines(config(parallel={"expert": 2}), dims)[0]
    assert lines(config(rollout={"expert_parallel": 2}), dims)[0].startswith("rollout.expert_parallel: 2")
    assert "head_dim: 192" in lines(config(), _with(dims, head_dim=192))[0]
    assert "head_dim: 33" in lines(config(), _with(dims, head_dim=33))[0]
    found = lines(config(parallel={"tensor": 3}), dims)
    assert any("num_attention_heads=32" in line and "1, 2, 4, 8" in line for line in found)


def test_longest_sequence_must_fit_cache_micro_batch_and_positions() -> None:
    dims = dims_of("Qwen3-8B")
    lengths = {"rollout": {"max_new_tokens": 100, "max_total_tokens": 611}, "trainer": {"micro_batch_tokens": 611}}
    keys = [line.split(":")[0] for line in lines(config(**lengths), dims)]
    assert keys == ["rollout.max_total_tokens", "trainer.micro_batch_tokens"]
    lengths["rollout"]["max_total_tokens"] = lengths["trainer"]["micro_batch_tokens"] = 612  # 512 + 100
    assert not check_model(config(**lengths), dims)
    assert "max_position_embeddings (600)" in lines(config(**lengths), _with(dims, max_position_embeddings=600))[0]


def test_bf16_contractions_beyond_8192_are_fine() -> None:
    cfg = at_tp(1, precision={"train": "bf16", "rollout": "bf16"})
    assert not check_model(cfg, dims_of("Qwen2.5-32B"))


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 16))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_shards_tile_the_tensor_and_cuts_are_what_a_walk_over_the_elements_finds(name: str, tp: int) -> None:
    """Oracle: the set of shard boundaries, element by element, against the multiples of 128."""
    dims = dims_of(name)
    for linear in layer_linears(dims):
        layout = shard(linear, dims, tp)
        size, part = (linear.k, layout.k) if linear.kind == "row" else (linear.n, layout.n)
        assert (linear.n if linear.kind == "row" else linear.k) == (layout.n if linear.kind == "row" else layout.k)
        if not layout.divides:
            assert size % tp
            continue
        boundaries = list(range(part, size, part))
        cut = any(b % 128 for b in boundaries)
        assert layout.cuts_weight_block == cut
        assert layout.cuts_activation_block == (cut and linear.kind == "row")
        assert linear.grid == (len(range(0, linear.n, 128)), len(range(0, linear.k, 128)))


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 16))
@settings(max_examples=120, deadline=None, derandomize=True)
def test_a_shard_has_groups_of_the_global_grid_or_is_refused(name: str, tp: int) -> None:
    """Oracle: every 1x128 group of every rank of a row-parallel linear, by its first and last global column, against
    the groups of the whole tensor. All of them are global ones, or the linear is named with sizes that work; those do.
    """
    dims = dims_of(name)
    found = lines(at_tp(tp), dims)
    for linear in (linear for linear in layer_linears(dims) if linear.kind == "row" and linear.k % tp == 0):
        whole = {(c, min(c + 128, linear.k)) for c in range(0, linear.k, 128)}
        width = linear.k // tp
        shards = range(0, linear.k, width)
        groups = {(s + c, s + min(c + 128, width)) for s in shards for c in range(0, width, 128)}
        named = [line for line in found if f"{linear.name} [" in line and "cuts an activation block" in line]
        assert bool(named) == (groups != whole)
        for line in named:
            sizes = line.partition("TP sizes that work: ")[2].partition(";")[0].split(", ")
            assert sizes
            assert all(not check_model(at_tp(int(size)), dims) for size in sizes)


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 16), st.integers(1, 16), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_shard_local_accepts_cut_shards_of_one_size_in_rank_order_only(
    name: str, train: int, engine: int, invariant: bool
) -> None:
    """With per-shard grids nothing is refused for a cut group, and whatever cuts one has one TP size on both sides and
    no invariant sums; where nothing is cut the setting changes nothing."""
    dims, local = dims_of(name), {"misaligned": "shard_local"}
    found = lines(at_tp(train, engine, invariant, precision=local), dims)
    assert not any("cuts an activation block" in line for line in found)
    layouts = [shard(linear, dims, tp) for linear in layer_linears(dims) for tp in (train, engine)]
    if not any(layout.cuts_activation_block for layout in layouts):
        assert found == lines(at_tp(train, engine, invariant), dims)
    elif not found:
        assert (train, invariant) == (engine, False)


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 16), st.integers(1, 16))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_accepted_invariant_layouts_give_every_rank_whole_segments(name: str, train: int, engine: int) -> None:
    """What `check` accepts must be computable: whole heads, whole blocks and whole segments on each rank."""
    dims = dims_of(name)
    if check_model(at_tp(train, engine, invariant=True), dims):
        return
    for tp in (train, engine):
        assert dims.num_heads % tp == 0
        for k in (dims.q_size, dims.intermediate_size):
            num_blocks = -(-k // 128)
            assert num_blocks % tp == 0
            per_segment = num_blocks // num_segments(k)
            assert (num_blocks // tp) % per_segment == 0
    assert dims.num_kv_heads % train == 0


def _with(dims: ModelDims, **changes: Any) -> ModelDims:
    return ModelDims(**{**dims.__dict__, **changes})
