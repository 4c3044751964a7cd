"""A conversion as a list of output files: streamed, in parallel, resumed after a kill, and in place only when whole.

Files are made in `.NAME.converting` beside the target, which gets its name by one rename at the end. Each finished file
is journaled; a second start of the same conversion (same inputs, same options) goes on from there.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from jetrl_megatron.atomic import write_atomic
from jetrl_megatron.native.tensors import use_threads
from jetrl_megatron.weights.convert.memory import Memory

SPARE_BYTES = 64 << 20  # headers, index, configuration, tokenizer
_JOB_FILE = ".job.json"
_DONE = ".done-"


@dataclass(frozen=True)
class Output:
    """A tensor that will be written. slot: which of the part's files it goes to."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    slot: int = 0

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Step(Protocol):
    """Makes a few tensors. Picklable: it may run in another process."""

    def outputs(self) -> Sequence[Output]:
        """What `chunks` will give, per slot in this order."""

    def chunks(self, memory: Memory) -> Iterator[tuple[int, Tensor]]:
        """(slot, consecutive rows of that slot's tensors), each valid until the next. memory: to make them in."""


@dataclass(frozen=True)
class Part:
    """Files that are written together, one per slot."""

    files: tuple[str, ...]
    steps: tuple[Step, ...]

    def outputs(self) -> list[Output]:
        return [output for step in self.steps for output in step.outputs()]

    @property
    def num_bytes(self) -> int:
        return sum(output.num_bytes for output in self.outputs())


Write = Callable[[Path, Part], Any]


@dataclass(frozen=True)
class Job:
    """out: folder to make. write: makes the files of one part in a folder, returns something JSON can hold (a module's
    function, so that worker processes find it). finish: adds what belongs to all parts, given the results in order.
    key: what makes two starts the same conversion."""

    out: Path
    parts: Sequence[Part]
    write: Write
    finish: Callable[[Path, list[Any]], None]
    key: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def staging(self) -> Path:
        """Where the files are made."""
        return self.out.absolute().with_name(f".{self.out.absolute().name}.converting")

    def run(self, workers: int = 1) -> None:
        """Convert. Raises ValueError: target exists, disk too small, bad input (nothing stays then), or another process
        at the same conversion. A kill leaves `staging`, from which the next start goes on."""
        if workers < 1:
            raise ValueError(f"workers: {workers}; rule: at least 1; fix: use 1 or more")
        _require_absent(self.out)
        with _exclusive(self.staging):
            done = self._resume()
            self._require_disk(done)
            try:
                results = self._parts(done, workers)
                self.finish(self.staging, results)
                for leftover in (*self.staging.glob(f"*{_DONE}*"), self.staging / _JOB_FILE):
                    leftover.unlink()
                _sync(self.staging)
                if self.out.exists():
                    self.out.rmdir()  # an empty folder
                os.replace(self.staging, self.out)
                _sync(self.out.absolute().parent)
            except (ValueError, OSError) as error:
                shutil.rmtree(self.staging, ignore_errors=True)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise ValueError(
                        f"{self.out}: the disk is full; rule: {self.num_bytes + SPARE_BYTES} bytes; fix: make room"
                    ) from error
                raise

    def _resume(self) -> dict[int, Any]:
        """Results of the parts that an earlier start of this conversion finished."""
        text = json.dumps(self.key, sort_keys=True)
        job_file = self.staging / _JOB_FILE
        if not job_file.is_file() or job_file.read_text() != text:
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir(parents=True)
            job_file.write_text(text)
        return {
            int(file.name.removeprefix(_DONE)): json.loads(file.read_text()) for file in self.staging.glob(f"{_DONE}*")
        }

    def _require_disk(self, done: dict[int, Any]) -> None:
        needed = SPARE_BYTES + sum(part.num_bytes for i, part in enumerate(self.parts) if i not in done)
        free = shutil.disk_usage(self.staging).free
        if needed > free:
            shutil.rmtree(self.staging)
            raise ValueError(
                f"{self.out}: needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; rule: the whole output fits; "
                f"fix: make room or choose another disk"
            )

    def _parts(self, done: dict[int, Any], workers: int) -> list[Any]:
        todo = [i for i in range(len(self.parts)) if i not in done]
        if workers == 1 or len(todo) < 2:
            for i in todo:
                done[i] = _make(self.write, self.staging, i, self.parts[i])
            return [done[i] for i in range(len(self.parts))]
        # Forked from a process that has imported torch once and used it never: its thread pool survives no fork.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([self.write.__module__])
        threads = max((os.cpu_count() or 1) // workers, 1)
        with concurrent.futures.ProcessPoolExecutor(workers, server, _set_threads, (threads,)) as pool:
            futures = {i: pool.submit(_make, self.write, self.staging, i, self.parts[i]) for i in todo}
            try:
                done |= {i: future.result() for i, future in futures.items()}
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return [done[i] for i in range(len(self.parts))]


def fingerprint(folder: Path, names: Iterable[str]) -> list[Any]:
    """Changes when one of the files does: names, sizes and times, for the key of a job."""
    stats = [(name, (folder / name).stat()) for name in sorted(names)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


_WRITE_BYTES = 256 << 10  # the page cache takes larger pieces in larger pages, which can be slow to get


def write_pieces(file: Any, view: memoryview) -> None:
    """Write all of it, a little at a time."""
    while view:
        view = view[file.write(view[:_WRITE_BYTES]) :]


_libc = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(file: Any) -> None:
    """Let the kernel write what it holds of an open file to disk while the conversion goes on."""
    if hasattr(_libc, "sync_file_range"):  # Linux
        _libc.sync_file_range(file.fileno(), ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def _set_threads(count: int) -> None:
    torch.set_num_threads(count)
    use_threads(count)


def _make(write: Write, folder: Path, index: int, part: Part) -> Any:
    result = write(folder, part)
    for file in part.files:
        _sync(folder / file)
    write_atomic(folder / f"{_DONE}{index}", json.dumps(result))
    return result


def _require_absent(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists; rule: a new or empty folder; fix: choose another or remove it")


@contextmanager
def _exclusive(staging: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process."""
    staging.parent.mkdir(parents=True, exist_ok=True)
    lock = staging.with_name(staging.name + ".lock")
    with open(lock, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{staging}: another process converts; rule: one at a time; fix: wait for it") from None
        try:
            yield
        finally:
            lock.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
