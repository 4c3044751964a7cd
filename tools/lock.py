"""Writes requirements/*.lock: the pins of requirements/*.txt with the hashes of their wheels, for the images.

    python tools/lock.py [NAME.lock ...]   rewrites the locks (asks pip's package index; downloads no wheel)

A lock holds one wheel's hash per package: Linux x86_64, and the Python of its image.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parents[1] / "requirements"
# glibc 2.36 (Debian 12) and older, newest first: what a wheel may ask for.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 16, -1)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]
DEBIAN_12, SGLANG_IMAGE = "3.11", "3.12"
IGNORE_PYTHON = ["--ignore-requires-python"]
# lock -> (Python, files of pins, with what they depend on, extra arguments)
LOCKS: dict[str, tuple[str, list[str], bool, list[str]]] = {
    "torch.lock": (DEBIAN_12, ["base.txt"], True, ["-c", "cpu.txt"]),
    "cpu.lock": (DEBIAN_12, ["cpu.txt", "nodeps.txt", "dev.txt"], False, []),
    "megatron.lock": (DEBIAN_12, ["nodeps-ignore-python.txt"], False, IGNORE_PYTHON),
    "gpu-image.lock": (SGLANG_IMAGE, ["gpu-image.txt"], False, IGNORE_PYTHON),
}


def resolve(python: str, files: list[str], dependencies: bool, extra: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--target", folder, "--only-binary=:all:", "--python-version", python]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        command += [part for name in files for part in ("-r", name)] + extra + ([] if dependencies else ["--no-deps"])
        # Wheels of the public index only: a machine's own builds have other hashes.
        environment = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
        environment["PIP_CONFIG_FILE"] = os.devnull
        subprocess.run(command, cwd=REQUIREMENTS, env=environment, check=True)
        return list(json.loads(report.read_text())["install"])


def main() -> None:
    chosen = sys.argv[1:] or list(LOCKS)
    for name, (python, files, dependencies, extra) in ((c, LOCKS[c]) for c in chosen):
        lines = [f"# Made by tools/lock.py from {', '.join(files)}: Python {python}, Linux x86_64. Do not edit."]
        for item in sorted(resolve(python, files, dependencies, extra), key=lambda i: i["metadata"]["name"].lower()):
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{item['metadata']['name']}=={item['metadata']['version']} --hash=sha256:{digest}")
        (REQUIREMENTS / name).write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines) - 1} packages")


if __name__ == "__main__":
    main()
