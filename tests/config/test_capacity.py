"""`jetrl plan`: shipped parts load and are planned, verdicts, formulas against hand counts, exit codes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jetrl_megatron.config import ConfigError, ModelDims, RunConfig, load_config
from jetrl_megatron.config.capacity import H100, CapacityPlan, Lengths, make_plan, resolve_layout, step_time
from jetrl_megatron.config.capacity.activations import layer_bytes_per_token
from jetrl_megatron.config.capacity.weights import active_parameters, bundle_bytes, num_parameters, stage_weights
from jetrl_megatron.config.dims import ARCHITECTURES
from jetrl_megatron.config.schema import PrecisionConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
RUNS = ("qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
RECIPES = ("math_8k", "deepmath_16k", "dapo_20k")
PRECISIONS = ("bf16", "fp8_rollout_tis", "fp8")
GPUS = (8, 16, 32, 64)

# Parameters of the checkpoints as generally known (written down from memory, no file at hand); not from the code.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama-3.1-8b": 8_030_261_248,
}
# Whether 8, 16, 32, 64 H100s of 80 GiB hold it, per precision: the table of docs/planning.md, made by the plan itself.
FITS = {
    ("qwen3-8b", "math_8k"): ("1111", "1111", "1111"),
    ("qwen3-8b", "deepmath_16k"): ("1111", "1111", "0111"),
    ("qwen3-8b", "dapo_20k"): ("0111", "0111", "0111"),
    ("qwen3-14b", "math_8k"): ("1111", "1111", "1111"),
    ("qwen3-14b", "deepmath_16k"): ("0111", "0111", "0111"),
    ("qwen3-14b", "dapo_20k"): ("0111", "0111", "0111"),
    ("qwen3-32b", "math_8k"): ("0111", "0111", "0011"),
    ("qwen3-32b", "deepmath_16k"): ("0011", "0011", "0011"),
    ("qwen3-32b", "dapo_20k"): ("0001", "0001", "0001"),
    ("qwen3-30b-a3b", "math_8k"): ("0011", "0011", "0011"),
    ("qwen3-30b-a3b", "deepmath_16k"): ("0001", "0001", "0001"),
    ("qwen3-30b-a3b", "dapo_20k"): ("0000", "0001", "0001"),
}


def parts(model: str, recipe: str, precision: str, gpus: int) -> list[str]:
    names = (f"models/{model}", f"recipes/{recipe}", f"precision/{precision}", f"layouts/{model}/{gpus}")
    return [str(CONFIGS / f"{name}.yaml") for name in names]


def load(model: str, recipe: str, precision: str, gpus: int, *overrides: str) -> tuple[RunConfig, ModelDims]:
    cfg = load_config(CONFIGS / "runs" / f"{model}.yaml", [*parts(model, recipe, precision, gpus), *overrides])
    assert cfg.model.architecture is not None
    return cfg, ModelDims.from_hf(cfg.model.architecture)


def plan(model: str, recipe: str, precision: str, gpus: int, *overrides: str) -> CapacityPlan:
    cfg, dims = load(model, recipe, precision, gpus, *overrides)
    return make_plan(cfg, dims, gpus, search=False)


def test_every_shipped_model_has_the_published_parameters() -> None:
    """Each file of configs/models gives the parameter count of its checkpoint: a wrong dim would change it."""
    found = {}
    for path in sorted((CONFIGS / "models").glob("*.yaml")):
        dims = ModelDims.from_hf(yaml.safe_load(path.read_text())["model"]["architecture"])
        assert dims.model_type in ARCHITECTURES
        cfg = RunConfig.model_validate({"model": {"path": "x"}, "data": {"path": "x"}})
        found[path.stem] = num_parameters(stage_weights(dims, resolve_layout(cfg, 1, 8), 0))
    assert found == PUBLISHED


@pytest.mark.parametrize("model", RUNS)
def test_shards_and_stages_hold_the_model_once(model: str) -> None:
    """Over tensor-parallel and pipeline ranks, with expert parallelism: shards add up to the published parameters;
    norms and the router are whole on every tensor-parallel rank."""
    cfg, dims = load(model, "math_8k", "fp8", 8)
    one = resolve_layout(cfg, 8, 8)
    for t, p, e in itertools.product((1, 2, 4), (1, 2, 4), (1, 4) if dims.moe else (1,)):
        layout = replace(one, tensor=t, pipeline=p, expert=e)
        total = 0
        for w in (w for stage in range(p) for w in stage_weights(dims, layout, stage)):
            copies = 1 if w.name in ("norms", "qk_norms", "router", "final_norm") else e if w.expert else t
            total += copies * w.numel
        assert total == PUBLISHED[model], (t, p, e)


@pytest.mark.parametrize("model", RUNS)
def test_every_combination_is_planned(model: str) -> None:
    """Run x recipe x precision x layout loads, breaks no rule of the model's dims, and has the documented verdict."""
    load_config(CONFIGS / "runs" / f"{model}.yaml")  # complete by itself
    for recipe in RECIPES:
        verdicts = []
        for precision in PRECISIONS:
            plans = [plan(model, recipe, precision, gpus) for gpus in GPUS]
            assert [p.violations for p in plans] == [[], [], [], []]
            assert [p.layout.training_ranks for p in plans] == [p.layout.engine_ranks for p in plans] == list(GPUS)
            verdicts.append("".join(str(int(p.fits)) for p in plans))
        assert tuple(verdicts) == FITS[model, recipe], (model, recipe)


def test_precisions_are_what_their_names_say() -> None:
    sides = {}
    for name in PRECISIONS:
        cfg, _ = load("qwen3-8b", "math_8k", name, 8)
        sides[name] = (cfg.precision.train, cfg.precision.rollout, cfg.mismatch.correction, cfg.require_exact)
    assert sides == {
        "bf16": ("bf16", "bf16", "none", True),
        "fp8_rollout_tis": ("bf16", "fp8", "tis", False),
        "fp8": ("fp8", "fp8", "none", True),
    }


@pytest.mark.parametrize(("model", "recipe"), [("qwen3-8b", "dapo_20k"), ("qwen3-32b", "math_8k")])
def test_the_nearest_layout_fits(model: str, recipe: str) -> None:
    """What the plan proposes for a layout that does not fit is itself a configuration that fits."""
    cfg, dims = load(model, recipe, "fp8", 8)
    found = make_plan(cfg, dims, 8)
    assert not found.fits
    assert found.nearest is not None
    gpus, overrides = found.nearest
    cfg, dims = load(model, recipe, "fp8", 8, *overrides)
    assert make_plan(cfg, dims, gpus, search=False).fits


IN_FLIGHT = {
    # 256 prompts x 4 samples of 1024 + 8192 tokens; 2 engines: 512 sequences each, 262144 // 9216 at once
    ("qwen3-8b", "math_8k", 8): (1024 * 9216, 28, 19),
    # 256 x 16 of 1024 + 16384; 2 engines: 2048 each, 131072 // 17408 at once
    ("qwen3-32b", "deepmath_16k", 16): (4096 * 17408, 7, 293),
    # 32 x 16 of 1024 + 20480; 16 engines: 32 each, 131072 // 21504 at once
    ("qwen3-30b-a3b", "dapo_20k", 64): (512 * 21504, 6, 6),
}


@pytest.mark.parametrize("case", IN_FLIGHT, ids=str)
def test_tokens_in_flight_by_hand(case: tuple[str, str, int]) -> None:
    """Tokens of a step; sequences that an engine decodes together, which the cache bounds; rounds for its share."""
    time = plan(case[0], case[1], "bf16", case[2]).time
    assert (time.step_tokens, time.decode_batch, time.decode_rounds) == IN_FLIGHT[case]


def floor_gib(model: str, tokens: int, bytes_per_parameter: int, t: int, p: int, cache_tokens: int) -> float:
    """By hand, BF16, of the last stage's GPU, which an engine of t ranks shares: parameters and optimizer, four copies
    of fp32 logits, engine weights, KV cache, 3 GiB of runtime. Without activations: what is above the limit cannot
    fit."""
    hidden, q, kv, inner, layers = {
        "qwen3-8b": (4096, 4096, 1024, 12288, 36),
        "qwen3-14b": (5120, 5120, 1024, 17408, 40),
        "qwen3-32b": (5120, 8192, 1024, 25600, 64),
    }[model]
    layer = hidden * (2 * q + 2 * kv) + 3 * hidden * inner
    table = 151936 * hidden
    stage = layers // p * layer + (2 if p == 1 else 1) * table
    engine = layers * layer + 2 * table
    cache = cache_tokens * 2 * 2 * layers * kv
    return (bytes_per_parameter * stage / t + 2 * engine / t + cache / t + 16 * 151936 * tokens) / (1 << 30) + 3


@pytest.mark.parametrize(
    ("model", "recipe", "gpus", "tokens", "bytes_per_parameter", "cache", "possible", "nearest"),
    [
        # 18 bytes per parameter; with a reference model 20
        ("qwen3-8b", "dapo_20k", 8, 21504, 18, 131072, {8: {(8, 1)}}, (8, 8, 1)),
        ("qwen3-14b", "deepmath_16k", 8, 17408, 20, 65536, {8: set(), 16: {(8, 2), (4, 4)}}, (16, 4, 4)),
        ("qwen3-32b", "deepmath_16k", 16, 17408, 20, 65536, {16: set(), 32: {(8, 4)}}, (32, 8, 4)),
    ],
)
def test_the_nearest_layout_by_hand(
    model: str,
    recipe: str,
    gpus: int,
    tokens: int,
    bytes_per_parameter: int,
    cache: int,
    possible: dict[int, set[tuple[int, int]]],
    nearest: tuple[int, int, int],
) -> None:
    """Three runs that do not fit: counted by hand, with half of the cache, all (tensor, pipeline) sizes but `possible`
    are above the limit of 76 GiB even without activations. The plan proposes one of these on the fewest GPUs: of two,
    that which changes fewer keys, training's tensor-parallel size being the engines' too."""
    for number, sizes in possible.items():
        found = {
            (t, p)
            for t, p in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
            if t * p <= number and floor_gib(model, tokens, bytes_per_parameter, t, p, cache) <= 0.95 * 80
        }
        assert found == sizes, number
    cfg, dims = load(model, recipe, "bf16", gpus)
    proposal = make_plan(cfg, dims, gpus).nearest
    assert proposal is not None
    changed, _ = load(model, recipe, "bf16", gpus, *proposal[1])
    assert (proposal[0], changed.parallel.tensor, changed.parallel.pipeline) == nearest


def test_saved_bytes_of_a_layer_by_hand() -> None:
    """Qwen3-8B at TP 4 with sequence parallelism, hand-counted per token and layer; FP8 keeps linear inputs in one byte
    plus a scale per 128. On GPU backends attention keeps two fp32 per head, and its result where no linear does."""
    cfg, dims = load("qwen3-8b", "math_8k", "fp8", 8)
    layout = resolve_layout(cfg, 8, 8)
    q, kv, inner = 4096 // 4, 1024 // 4, 12288 // 4
    common = 2 * 2 * 4096 / 4 + 2 * (q + 2 * kv) + 2 * q + 2 * 2 * (q + kv) + 2 * 2 * 4 * 64 + 2 * 2 * inner
    widths = (4096, q, 4096, inner)
    for precision, expected in (("bf16", sum(2 * w for w in widths)), ("fp8", sum(w + 4 * w // 128 for w in widths))):
        for backend, attention in (("emulated", 0), ("triton", 2 * 4 * 8 + (2 * q if precision == "fp8" else 0))):
            section = PrecisionConfig.model_validate({"train": precision, "backend": backend})
            assert sum(layer_bytes_per_token(dims, layout, section).values()) == common + expected + attention


def test_decode_is_bound_by_memory_and_training_by_flops() -> None:
    """Two estimates by hand: a decode step of one sequence reads the weights once; a BF16 forward on one GPU is 2 FLOPs
    per weight and token, plus attention and lm_head."""
    cfg, dims = load("qwen3-8b", "math_8k", "bf16", 8, "trainer.prompts_per_step=1", "rollout.samples_per_prompt=1")
    layout = replace(
        resolve_layout(cfg, 8, 8), tensor=1, pipeline=1, data=1, engine_tensor=1, num_engines=1, sequence=False
    )
    lengths = Lengths(1, 1)
    time = step_time(cfg, dims, layout, H100, lengths)
    linears, head = active_parameters(dims)
    assert linears + head == pytest.approx(8.19e9 - 151936 * 4096, rel=1e-3)
    read = 2 * (linears + head)
    assert time.phases_s["rollout decode"] == pytest.approx(read / (3.35e12 * 0.65), rel=1e-3)
    flops = 2 * 2 * linears + 2 * head
    assert time.phases_s["log-probs"] == pytest.approx(flops / (989.5e12 * 0.5), rel=1e-3)


def test_bundle_bytes_by_hand() -> None:
    """Llama-3.1-8B as FP8: linears one byte and 4 bytes per 128 x 128, the rest in bf16."""
    path = CONFIGS / "models" / "llama-3.1-8b.yaml"
    dims = ModelDims.from_hf(yaml.safe_load(path.read_text())["model"]["architecture"])
    linears = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    rest = 8_030_261_248 - linears
    assert bundle_bytes(dims, fp8=True) == linears + linears // (128 * 128) * 4 + 2 * rest
    assert bundle_bytes(dims, fp8=False) == 2 * 8_030_261_248


def test_parts_are_merged_from_left_to_right(tmp_path: Path) -> None:
    """A part replaces the keys that it has and no others; a later `key=value` wins; unknown keys are refused."""
    part = tmp_path / "part.yaml"
    part.write_text("trainer: {num_steps: 7, seed: 3}\n")
    run = CONFIGS / "runs" / "qwen3-8b.yaml"
    cfg = load_config(run, [str(part), "trainer.seed=4"])
    assert (cfg.trainer.num_steps, cfg.trainer.seed, cfg.trainer.prompts_per_step) == (7, 4, 256)
    assert load_config(run, ["trainer.seed=4", str(part)]).trainer.seed == 3
    part.write_text("trainer: {num_stepz: 7}\n")
    with pytest.raises(ConfigError, match=r"trainer\.num_stepz.*did you mean trainer\.num_steps"):
        load_config(run, [str(part)])
    with pytest.raises(ConfigError, match=r"absent\.yaml; rule: an existing YAML file"):
        load_config(run, [str(tmp_path / "absent.yaml")])


def jetrl_plan(*args: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom jetrl_megatron.cli.main import app\n"
        "code = app(['plan', *sys.argv[1:]], standalone_mode=False)\n"
        "heavy = {'torch', 'sglang', 'megatron', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)\n"
    )
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_exit_codes_and_json() -> None:
    """0 fits, 1 does not, 2 a wrong configuration; JSON says the same as the text; torch stays unimported."""
    run = "configs/runs/qwen3-8b.yaml"
    fits = jetrl_plan(run, *parts("qwen3-8b", "math_8k", "fp8", 8), "--gpus", "8", "--json")
    assert (fits.returncode, fits.stderr) == (0, "")
    report = json.loads(fits.stdout)
    assert report["fits"] is True
    memory = report["memory"][0]
    peak = max(sum(parts.values()) for parts in memory["peak_bytes"].values())
    assert memory["total_bytes"] == sum(memory["resident_bytes"].values()) + peak
    small = jetrl_plan(run, *parts("qwen3-8b", "math_8k", "fp8", 8), "--gpus", "8", "--gpu-memory-gib", "40")
    assert small.returncode == 1
    assert "verdict: does not fit; nearest that does: --gpus" in small.stdout
    assert "ESTIMATED" in small.stdout
    assert "engine i on node i mod 1; node 0: engine 0 GPUs 0-3, engine 1 GPUs 4-7" in small.stdout
    wrong = jetrl_plan(run)
    assert wrong.returncode == 2
    assert "model.path: models/Qwen3-8B" in wrong.stderr
    assert "configs/models/NAME.yaml" in wrong.stderr
    uneven = jetrl_plan(run, *parts("qwen3-8b", "math_8k", "fp8", 8), "--gpus", "4")
    assert uneven.returncode == 2
    assert "--gpus: 4 with parallel.tensor=4" in uneven.stderr


def test_more_gpus_never_need_more_memory() -> None:
    """Over all shipped layouts of a model: the bytes of weights and states per GPU fall or stay."""
    for model, precision in itertools.product(RUNS, PRECISIONS):
        states = [plan(model, "math_8k", precision, g).worst.resident["masters fp32"] for g in GPUS]
        assert states == sorted(states, reverse=True), (model, states)
