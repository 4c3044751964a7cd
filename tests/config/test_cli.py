"""Claims about `jetrl`, run as a user runs it: exit codes, one line per fault on stderr, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl_megatron.cli.hardware import Gpu, fp8_backend, parse_gpus

ROOT = Path(__file__).resolve().parents[2]
MakeFolder = Callable[..., Path]
Done = subprocess.CompletedProcess[str]


def jetrl(*args: str, code: str | None = None) -> Done:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "jetrl_megatron.cli"]
    return subprocess.run([*command, *args], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def assert_user_error(done: Done, *parts: str) -> None:
    """Exit code 2, nothing on stdout, exactly one line on stderr, holding all `parts`."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def write_config(folder: Path, rows: Path) -> Path:
    path = rows.parent / "good.yaml"
    path.write_text(
        f"model: {{path: {folder}}}\ndata: {{path: {rows}}}\nsync: {{staging_dir: {rows.parent}}}\n"
        "rollout: {max_new_tokens: 8}\n"
    )
    return path


@pytest.fixture
def good(hf_folder: MakeFolder, rows: Path) -> Path:
    """A configuration that passes every check."""
    return write_config(hf_folder(), rows)


def test_check_prints_the_plan_without_torch(hf_folder: MakeFolder, rows: Path) -> None:
    """`jetrl check` answers fast on a login node: torch, SGLang and Megatron-Core stay unimported.

    8 heads x 32: o_proj [128, 256] splits at TP 2 into whole blocks; k_proj [64, 128] shares one block's amax.
    """
    code = (
        "import sys\n"
        "from jetrl_megatron.cli.main import app\n"
        "code = app(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'sglang', 'megatron', 'transformers', 'triton'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else code)\n"
    )
    config = write_config(hf_folder(num_attention_heads=8), rows)
    done = jetrl("check", str(config), "rollout.tensor_parallel=2", "parallel.tp_invariant=true", code=code)
    assert (done.returncode, done.stderr) == (0, "")
    table = {cells[0]: cells[1:] for cells in map(_cells, done.stdout.splitlines()) if len(cells) == 8}
    assert table["self_attn.o_proj"] == [
        "128 x 256",
        "1 x 2",
        "row, S=2",
        "128 x 256",
        "aligned",
        "128 x 128",
        "aligned",
    ]
    assert table["self_attn.k_proj"][-2:] == ["32 x 128", "shared weight amax"]
    assert len(table) == 8  # seven linears and the heading
    assert "qwen3, 2 layers" in done.stdout


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ ").replace("┃", "│").split("│")]


def test_check_tells_the_block_layout_of_each_side(good: Path) -> None:
    """Hidden 128, q 4 x 32: o_proj at TP 2 has K = 64 a rank, half a block, so the engine side is refused."""
    mixed = ("precision.train=bf16", "precision.flow_check=warn")
    done = jetrl("check", str(good), "rollout.tensor_parallel=2", "parallel.tp_invariant=false", *mixed)
    assert_user_error(done, "rollout.tensor_parallel: 2 with self_attn.o_proj [128, 128]", "TP sizes that work: 1")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["rollout.temprature=1"], ["rollout.temprature", "did you mean rollout.temperature"]),
        (["trainer.num_steps=many"], ['trainer.num_steps: "many"; rule: type integer']),
        (["nonsense"], ["the form section.key=value"]),
        (["model.path=nowhere"], ["model.path: nowhere; rule: an existing checkpoint"]),
        (["data.path=nowhere.jsonl"], ["data.path: nowhere.jsonl; rule: an existing JSONL file"]),
        (["data.answer_field=solution"], [":1: no field 'solution'"]),
        (["reward.kind=oops"], ['reward.kind: "oops"']),
        (["parallel.expert=2"], ["parallel.expert: 2", "dense model"]),
        (["parallel.pipeline=3"], ["parallel.pipeline: 3", "use one of [1, 2]"]),
        (["precision.train=bf16"], ["precision.flow_check: error", "precision.flow_check=warn"]),
        (["precision.flow_check=warn"], ["precision.flow_check: warn", "mismatch.require_exact=false"]),
        (["rollout.max_total_tokens=100"], ["rollout.max_total_tokens: 100", "520"]),
    ],
)
@pytest.mark.parametrize("command", ["check", "train"])
def test_bad_input_is_one_line_and_exit_code_2(
    good: Path, tmp_path: Path, command: str, overrides: list[str], parts: list[str]
) -> None:
    if "data.answer_field=solution" in overrides:  # one bad row, one line
        rows = tmp_path / "one.jsonl"
        rows.write_text('{"question": "1", "answer": "2"}\n')
        overrides = [*overrides, f"data.path={rows}"]
    run_dir = tmp_path / "run"
    assert_user_error(jetrl(command, str(good), *overrides, "--run-dir", str(run_dir)), *parts)
    assert not run_dir.exists()


def test_missing_config_file(tmp_path: Path) -> None:
    assert_user_error(jetrl("check", str(tmp_path / "no.yaml")), "no.yaml", "an existing YAML file")


def test_two_faults_are_two_lines(good: Path) -> None:
    done = jetrl("check", str(good), "trainer.num_steps=0", "rollout.top_p=2")
    assert done.returncode == 2
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == ["rollout.top_p", "trainer.num_steps"]


def test_train_refuses_the_folder_of_an_earlier_run(good: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("{}\n")
    assert_user_error(jetrl("train", str(good), "--run-dir", str(run_dir)), "metrics.jsonl", "add --resume")
    assert (run_dir / "metrics.jsonl").read_text() == "{}\n"


def test_train_hands_configuration_folder_and_resume_to_launch(good: Path, tmp_path: Path) -> None:
    """The launcher's return value is the exit code; the default run folder is runs/<name>."""
    code = (
        "import sys, types\n"
        "module = types.ModuleType('jetrl_megatron.trainer.launch')\n"
        "def launch(cfg, run_dir, task):\n"
        "    print(cfg.trainer.num_steps, run_dir, task)\n"
        "    return 7\n"
        "module.launch = launch\n"
        "sys.modules['jetrl_megatron.trainer.launch'] = module\n"
        "from jetrl_megatron.cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    done = jetrl("train", str(good), "trainer.num_steps=3", "name=mine", "--resume", code=code)
    assert (done.returncode, done.stdout) == (7, f"3 {Path('runs') / 'mine'} resume\n"), done.stderr


def test_precision_flow_starts_the_same_model_without_warm_start(tmp_path: Path) -> None:
    """Unequal precisions are allowed here: telling what differs is what the command is for. The results' folder holds
    the run's; the exit code is the launcher's."""
    code = (
        "import sys, types\n"
        "module = types.ModuleType('jetrl_megatron.trainer.launch')\n"
        "def launch(cfg, run_dir, task):\n"
        "    print(cfg.model.init, cfg.precision.train, cfg.logging.tensorboard, run_dir, task)\n"
        "    return 1\n"
        "module.launch = launch\n"
        "sys.modules['jetrl_megatron.trainer.launch'] = module\n"
        "from jetrl_megatron.cli.main import app\n"
        "app(sys.argv[1:])\n"
    )
    config = str(ROOT / "configs" / "quickstart.yaml")
    done = jetrl("precision-flow", config, "--out", str(tmp_path), "precision.train=bf16", code=code)
    expected = f"random bf16 False {tmp_path / 'run'} precision-flow\n"
    assert (done.returncode, done.stdout) == (1, expected), done.stderr
    assert_user_error(jetrl("precision-flow", config, "--out", str(tmp_path), "parallel.pipeline=3"), "pipeline: 3")


def test_schema_lists_keys_with_defaults() -> None:
    done = jetrl("schema")
    assert done.returncode == 0
    assert "  trainer.num_steps: integer, >= 1 (10) -- RL steps" in done.stdout.splitlines()


def test_doctor_reports_what_pip_metadata_says() -> None:
    from importlib.metadata import version

    done = jetrl("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["sglang"] == version("sglang")
    assert report["versions"]["megatron-core"] == version("megatron-core")
    assert report["gloo"] is True
    assert report["fp8_backend"] in ("emulated", "triton", "deep_gemm")
    assert (report["fp8_backend"] == "emulated") or report["gpus"]


def test_doctor_says_what_the_machine_says() -> None:
    """Ports, limits and sizes against the operating system's own answers; keys that launch scripts read stay."""
    import resource
    import socket
    import time

    with socket.socket() as server, socket.socket() as unused:
        server.bind(("", 0))
        server.listen()
        unused.bind(("", 0))
        busy, free = server.getsockname()[1], unused.getsockname()[1]
        unused.close()
        done = jetrl("doctor", "--json", "--port", str(busy), "--port", str(free))
    report = json.loads(done.stdout)
    assert report["ports_checked"] == [busy, free]
    assert report["ports_busy"] == [busy]
    assert f"port {busy}: in use; rule: free; fix: another port" in report["problems"]
    assert set(report["entry_point_faults"].values()) == {None}
    assert all(report["entry_points"].values())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert report["nofile_hard"] == (None if hard == resource.RLIM_INFINITY else hard)
    assert abs(report["clock"]["unix_s"] - time.time()) < 120
    assert report["shm_total_bytes"] >= report["shm_free_bytes"]
    assert len(report["gpu_use"]["used_mib"]) == len(report["gpus"])
    stable = "python versions entry_points torch_cuda_build gloo gpus fp8_backend fp8_backend_reason cpu_kernels cores"
    assert {*stable.split(), "nofile", "memlock_bytes", "shm_free_bytes", "disk_free_bytes"} <= set(report)


def test_doctor_names_an_entry_point_that_cannot_be_loaded() -> None:
    from jetrl_megatron.cli.machine import load_fault

    assert load_fault("sglang.srt.plugins", "jetrl", "jetrl_megatron.rollout.plugin:register") is None
    assert load_fault("sglang.srt.plugins", "jetrl", "elsewhere:register") == "not registered"


def test_import_gguf_of_nothing(tmp_path: Path) -> None:
    assert_user_error(jetrl("import-gguf", str(tmp_path / "no.gguf"), str(tmp_path / "out")), "no.gguf", "existing")


def test_a_backend_that_cannot_run_is_refused(good: Path) -> None:
    """precision.backend names its reason and exits 2 where the machine lacks the GPU; emulated is always accepted."""
    hidden = "import jetrl_megatron.cli.main as main; main.find_gpus = lambda: []; main.app()"
    for name in ("triton", "deep_gemm"):
        done = jetrl("check", str(good), f"precision.backend={name}", code=hidden)
        assert_user_error(done, f"precision.backend: {name}", "no NVIDIA GPU", "fix: auto, or emulated")
    done = jetrl("check", str(good), "precision.backend=emulated", code=hidden)
    assert done.returncode == 0, done.stderr
    assert "FP8 backend emulated" in done.stdout


def test_engines_without_a_gpu_are_refused(good: Path) -> None:
    """On a machine with two GPUs: two training ranks and two engines share them; one engine would lie on one of the two
    only, four ranks have no place. `check` says so, and names what fits."""
    two = (
        "import jetrl_megatron.cli.main as main; from jetrl_megatron.cli.hardware import Gpu; "
        "main.find_gpus = lambda: 2 * [Gpu('L4', (8, 9), 23034)]; main.app()"
    )
    args = ("check", str(good), "precision.backend=emulated", "parallel.data=2")
    uneven = jetrl(*args, code=two)
    value = "rollout.num_engines: 1 of 1 GPUs each on 1 node(s) of 2 GPUs"
    assert_user_error(uneven, value, "fix: 2 that share its GPUs")
    assert jetrl(*args, "rollout.num_engines=2", code=two).returncode == 0
    assert_user_error(jetrl(*args[:3], "parallel.data=4", code=two), "parallel: 4 ranks on a node of 2 GPUs")


def test_gpu_rows_and_backend() -> None:
    """auto follows the weakest GPU: DeepGEMM on Hopper, Triton on it without DeepGEMM and on other FP8 GPUs."""
    hopper = parse_gpus("NVIDIA H100 80GB HBM3, 9.0, 81559\nweird, [N/A], [N/A]\n\n")
    assert hopper == [Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81559)]
    ada, blackwell = Gpu("L40S", (8, 9), 46068), Gpu("B200", (10, 0), 183359)
    assert fp8_backend(hopper, True)[0] == "deep_gemm"
    assert fp8_backend(hopper, False)[0] == "triton"
    assert fp8_backend([*hopper, ada], True) == (
        "triton",
        "the DeepGEMM kernels need compute capability 9.x (Hopper), found 8.9",
    )
    assert fp8_backend([*hopper, blackwell], True)[0] == "triton"
    assert fp8_backend([*hopper, Gpu("A100", (8, 0), 40960)], True)[0] == "emulated"
    assert fp8_backend([], True)[0] == "emulated"
