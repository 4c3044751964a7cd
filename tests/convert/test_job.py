"""Killed conversions go on where they were; nothing half-written has the target's name; disk and target are checked
first; worker processes change nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from jetrl_megatron.megatron.convert import hf_to_megatron, megatron_to_hf
from jetrl_megatron.weights.convert import job as jobs
from jetrl_megatron.weights.convert.hf_files import write_safetensors
from jetrl_megatron.weights.convert.job import Job, Part
from jetrl_megatron.weights.convert.layout import Layout
from jetrl_megatron.weights.convert.precision import bf16_to_fp8
from tests.convert.conftest import Models
from tests.convert.support import assert_same

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from jetrl_megatron.weights.convert import job, precision

done = []
make = job._make
def killed(*args):
    if len(done) == 2:
        (args[1] / args[3].files[0]).write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    done.append(make(*args))
    return done[-1]
job._make = killed
made = precision.bf16_to_fp8(Path(sys.argv[1]), Path(sys.argv[2]), workers=4)
made.run(1)
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_killed_and_resumed(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL while the third of four shards is half-written: no target; the next start makes the other two only, and
    the result is byte for byte that of an undisturbed conversion."""
    out, source = tmp_path / "out", models("qwen3")
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    again = bf16_to_fp8(source, out, workers=4)
    assert (again.staging / again.parts[2].files[0]).read_bytes() == b"half"
    written: list[str] = []

    def counted(folder: Path, part: Part) -> None:
        written.extend(part.files)
        write_safetensors(folder, part)

    Job(again.out, again.parts, counted, again.finish, again.key).run()
    assert written == [part.files[0] for part in again.parts[2:]]
    bf16_to_fp8(source, tmp_path / "undisturbed", workers=4).run()
    assert files_of(out) == files_of(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "undisturbed"]


def test_other_options_start_anew(tmp_path: Path, models: Models) -> None:
    """What a killed conversion left is not mixed with that of other options or of a changed source."""
    source = shutil.copytree(models("llama"), tmp_path / "source")
    left = bf16_to_fp8(source, tmp_path / "out", "pow2")
    left.staging.mkdir()
    left._resume()
    (left.staging / ".done-0").write_text("null")
    assert left._resume() == {0: None}
    assert bf16_to_fp8(source, tmp_path / "out", "fp32")._resume() == {}
    os.utime(source / "config.json", ns=(1, 1))
    assert bf16_to_fp8(source, tmp_path / "out", "pow2")._resume() == {}


@pytest.mark.multi
def test_workers_change_nothing(tmp_path: Path, models: Models) -> None:
    """Two processes write the files that one writes."""
    hf_to_megatron(models("qwen2"), tmp_path / "a", Layout(2)).run(1)
    hf_to_megatron(models("qwen2"), tmp_path / "b", Layout(2)).run(2)
    a, b = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert a.keys() == b.keys()
    assert a[".metadata"] == b[".metadata"]
    megatron_to_hf(tmp_path / "b", tmp_path / "hf").run()
    assert_same(tmp_path / "hf", models("qwen2"))


def test_disk_and_target_are_checked_first(tmp_path: Path, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little disk, an existing target, and a second process at the same target are refused; nothing stays."""
    usage = namedtuple("usage", "free")
    made = bf16_to_fp8(models("llama"), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(jobs.shutil, "disk_usage", lambda _path: usage(made.num_bytes + jobs.SPARE_BYTES - 1))
        with pytest.raises(ValueError, match=r"out: needs 0.07 GB, 0.07 GB are free; rule: the whole output fits"):
            made.run()
    assert not list(tmp_path.iterdir())
    with jobs._exclusive(made.staging), pytest.raises(ValueError, match="another process converts"):
        made.run()
    made.run()
    before = files_of(tmp_path / "out")
    with pytest.raises(ValueError, match=r"out: exists; rule: a new or empty folder"):
        made.run()
    assert files_of(tmp_path / "out") == before
    with pytest.raises(ValueError, match="workers: 0"):
        bf16_to_fp8(models("llama"), tmp_path / "b").run(0)


def test_full_disk_leaves_nothing(tmp_path: Path, models: Models) -> None:
    """A disk that fills up while writing (a quota of /dev/full's kind) is a named error and nothing stays."""
    made = bf16_to_fp8(models("llama"), tmp_path / "out")

    def full(folder: Path, part: Part) -> None:
        write_safetensors(folder, part)
        with open("/dev/full", "wb", buffering=0) as device:
            device.write(b"x")

    with pytest.raises(ValueError, match="out: the disk is full"):
        Job(made.out, made.parts, full, made.finish, made.key).run()
    assert not list(tmp_path.iterdir())


def test_killed_from_outside(tmp_path: Path, models: Models) -> None:
    """The script killed at any time by SIGKILL, then run again: the conversion of an undisturbed run."""
    command = [sys.executable, "tools/convert/hf_to_megatron.py", "--hf", str(models("qwen2")), "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "out")], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.converting").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    if (tmp_path / "out").exists():  # it was faster
        shutil.rmtree(tmp_path / "out")
    subprocess.run([*command, str(tmp_path / "out")], cwd=ROOT, check=True, capture_output=True)
    hf_to_megatron(models("qwen2"), tmp_path / "undisturbed", Layout()).run()
    ours, expected = files_of(tmp_path / "out"), files_of(tmp_path / "undisturbed")
    assert ours.keys() == expected.keys()
    assert ours[".metadata"] == expected[".metadata"]
    megatron_to_hf(tmp_path / "out", tmp_path / "hf").run()
    assert_same(tmp_path / "hf", models("qwen2"))
