"""Claims about reading a configuration: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_megatron.config import ConfigError, RunConfig, dump_config, load_config
from jetrl_megatron.config.schema_doc import schema_text, walk
from jetrl_megatron.config.yaml_io import dump_yaml, parse_yaml

MINIMAL = "model: {path: some/model}\ndata: {path: rows.jsonl}\n"
MakeFile = Callable[[str], Path]


def fault(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as info:
        load_config(path, overrides)
    assert not any("pydantic" in e or "\n" in e for e in info.value.errors)
    return info.value.errors


def test_minimal_file_takes_every_other_value_from_the_schema(config_file: MakeFile) -> None:
    """A file with the two required sections equals the schema's defaults."""
    cfg = load_config(config_file(MINIMAL))
    expected = RunConfig.model_validate({"model": {"path": "some/model"}, "data": {"path": "rows.jsonl"}})
    assert cfg == expected
    assert cfg.precision.train == cfg.precision.rollout == "fp8"
    assert cfg.require_exact


def test_overrides_are_yaml_and_the_last_one_wins(config_file: MakeFile) -> None:
    cfg = load_config(
        config_file(MINIMAL),
        ["trainer.num_steps=3", "trainer.num_steps=7", "optimizer.lr=3e-4", "rollout.stop_token_ids=[1, 2]",
         "model.architecture.hidden_size=64", "logging.wandb_project=a=b", "parallel.tp_invariant=false"],
    )  # fmt: skip
    assert cfg.trainer.num_steps == 7
    assert cfg.optimizer.lr == 3e-4
    assert cfg.rollout.stop_token_ids == (1, 2)
    assert cfg.model.architecture == {"hidden_size": 64}
    assert cfg.logging.wandb_project == "a=b"
    assert cfg.parallel.tp_invariant is False


def test_override_of_an_aliased_section_leaves_its_twin_alone(config_file: MakeFile) -> None:
    text = MINIMAL + "rollout: &sampling {temperature: 0.5, samples_per_prompt: 4}\neval: *sampling\n"
    cfg = load_config(config_file(text), ["eval.temperature=0.0"])
    assert (cfg.rollout.temperature, cfg.eval.temperature) == (0.5, 0.0)


@pytest.mark.parametrize("text", ["1e-3", "3e-4", "1E5", "+2e+3", "1.5e-7", "-1e0"])
def test_floats_without_a_dot_are_numbers(text: str) -> None:
    """PyYAML alone reads `1e-3` as text; a learning rate must not depend on a dot."""
    value = parse_yaml(f"x: {text}")["x"]
    assert isinstance(value, float)
    assert value == float(text)


@pytest.mark.parametrize("text", ["e3", "1e", "3e4x", "1-3", "0x1e3", "v1e3"])
def test_other_text_stays_as_pyyaml_reads_it(text: str) -> None:
    assert parse_yaml(f"x: {text}") == yaml.safe_load(f"x: {text}")


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
    | st.from_regex(r"[-+]?\d+[eE]\d+", fullmatch=True)
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_dumped_text_loads_back_as_the_same_text(text: str) -> None:
    """Also text that looks like a number (`3e4`), which the stock dumper would leave unquoted."""
    assert parse_yaml(dump_yaml({"x": text})) == {"x": text}


@given(
    lr=st.floats(min_value=1e-12, max_value=1e3),
    wandb=st.none() | st.sampled_from(["3e4", "null", "yes", "a: b", "ünï", "0x10", "# x", " lead", "1_000e3"]),
    stops=st.none() | st.lists(st.integers(0, 200000), max_size=3),
    tensor=st.integers(1, 64),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_resolved_yaml_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, lr: float, wandb: str | None, stops: list[int] | None, tensor: int
) -> None:
    cfg = RunConfig.model_validate(
        {
            "model": {"path": "m", "architecture": {"model_type": "qwen3", "rope_theta": 1e4, "eos": [1, 2]}},
            "data": {"path": "d"},
            "optimizer": {"lr": lr},
            "logging": {"wandb_project": wandb},
            "rollout": {"stop_token_ids": stops},
            "parallel": {"tensor": tensor},
        }
    )
    path = tmp_path_factory.mktemp("dump") / "resolved.yaml"
    path.write_text(dump_config(cfg), encoding="utf-8")
    assert load_config(path) == cfg


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("rollout.temprature=1", "rollout.temprature", "rollout.temperature"),
        ("trainer.learning_rate=1", "trainer.learning_rate", None),
        ("trainer.lr=1", "trainer.lr", "optimizer.lr"),
        ("lr=1", "lr", "optimizer.lr"),
        ("rolout.max_new_tokens=1", "rolout", "rollout"),
        ("model.warmstart.step=1", "model.warmstart.step", "model.warmstart.num_steps"),
        ("parallel.tensor_parallel=2", "parallel.tensor_parallel", "rollout.tensor_parallel"),
    ],
)
def test_unknown_key_names_the_nearest_valid_key(
    config_file: MakeFile, override: str, key: str, nearest: str | None
) -> None:
    (line,) = fault(config_file(MINIMAL), override)
    assert line.startswith(f"{key}: ")
    assert "rule: a known key" in line
    if nearest is None:  # nothing near: the section's keys are listed instead
        assert "trainer.num_steps" in line
    else:
        assert nearest in line.split("fix: ")[1]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.num_steps='3'", 'trainer.num_steps: "3"; rule: type integer, >= 1; fix: write e.g. 10'),
        ("parallel.tensor=true", "parallel.tensor: true; rule: type integer, >= 1; fix: write e.g. 1"),
        ("trainer.seed=1.5", "trainer.seed: 1.5; rule: type integer, >= 0; fix: write e.g. 0"),
        ("optimizer.lr=fast", 'optimizer.lr: "fast"; rule: type number, > 0; fix: write e.g. 1e-06'),
        ("optimizer.lr=.nan", "optimizer.lr: nan; rule: a finite number; fix: write a finite number"),
        ("optimizer.lr=-1", "optimizer.lr: -1; rule: > 0.0; fix: choose a value in that range"),
        ("precision.train=fp88", 'precision.train: "fp88"; rule: one of bf16 | fp8; fix: did you mean fp8?'),
        ("rollout=", "rollout: null; rule: a section (mapping); fix: put keys under `rollout:` or remove it"),
        ("name=1", 'name: 1; rule: type text; fix: put it in quotes: "1"'),
    ],
)
def test_wrong_value_says_value_rule_and_fix(config_file: MakeFile, override: str, expected: str) -> None:
    assert fault(config_file(MINIMAL), override) == [expected]


def test_several_faults_are_one_line_each(config_file: MakeFile) -> None:
    lines = fault(config_file("modle: {}\ndata: {path: x, shufle: true}\ntrainer: {num_steps: 0}\n"))
    assert [line.split(":")[0] for line in lines] == ["model", "data.shufle", "trainer.num_steps", "modle"]


def test_messages_of_section_validators_get_the_section_in_front(config_file: MakeFile) -> None:
    (line,) = fault(config_file("model: {init: hf}\ndata: {task: chain}\n"))
    assert line.startswith("model.path: missing; rule: init hf reads an HF folder; fix: ")


def test_messages_of_cross_section_validators_pass_unchanged(config_file: MakeFile) -> None:
    (line,) = fault(config_file(MINIMAL), "precision.train=bf16", "mismatch.require_exact=true")
    assert line.startswith("mismatch.require_exact: true with precision.train=bf16, precision.rollout=fp8; rule: ")


def test_duplicate_keys_are_refused_with_the_line(config_file: MakeFile) -> None:
    """YAML libraries silently keep the last one: a doubled `rollout:` section would lose half its keys."""
    path = config_file(MINIMAL + "rollout: {num_engines: 1}\nrollout: {top_k: 5}\n")
    (line,) = fault(path)
    assert "'rollout' appears twice" in line
    assert f"{path}:4" in line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: [", "valid YAML"),
        ("", "a mapping of sections"),
        ("- 1\n", "a mapping"),
        ("x: 2026-13-01", "valid YAML"),
    ],
)
def test_broken_yaml_is_a_config_error(config_file: MakeFile, text: str, part: str) -> None:
    (line,) = fault(config_file(text))
    assert part in line


def test_unreadable_files_are_config_errors(tmp_path: Path) -> None:
    assert "an existing YAML file" in fault(tmp_path / "none.yaml")[0]
    assert "readable" in fault(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff\n")
    assert "UTF-8" in fault(tmp_path / "latin.yaml")[0]


@pytest.mark.parametrize("override", ["foo", "=3", "a..b=1", ".a=1", ""])
def test_malformed_override(config_file: MakeFile, override: str) -> None:
    (line,) = fault(config_file(MINIMAL), override)
    assert "the form section.key=value" in line


def test_home_is_expanded_and_relative_paths_stay(config_file: MakeFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("WHERE", "elsewhere")
    cfg = load_config(config_file(MINIMAL), ["model.path=~/m", "eval.path=$WHERE/e"])
    assert cfg.model.path == "/somewhere/m"
    assert cfg.data.path == "rows.jsonl"
    assert cfg.eval.path == "$WHERE/e"


def test_configuration_is_frozen(config_file: MakeFile) -> None:
    cfg = load_config(config_file(MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        cfg.trainer.num_steps = 3  # type: ignore[misc]


def test_schema_text_names_every_key_of_a_resolved_configuration(config_file: MakeFile) -> None:
    """`jetrl schema` and the dumped configuration list the same keys, and every key has a help text."""

    def keys(node: dict[str, object], prefix: str = "") -> set[str]:
        out: set[str] = set()
        for name, value in node.items():
            out |= {prefix + name} | (keys(value, f"{prefix}{name}.") if isinstance(value, dict) else set())
        return out

    documented = {doc.key for doc in walk()}
    assert documented == keys(yaml.safe_load(dump_config(load_config(config_file(MINIMAL)))))
    assert all(doc.help for doc in walk())
    assert "optimizer.lr: number, > 0 (1e-06) -- peak learning rate" in schema_text()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_configuration_loads(path: Path) -> None:
    load_config(path)
