#!/usr/bin/env bash
# Make (or update) the virtual environment $VENV (default .venv). Runs again only when the requirements changed.
#   PYTHON=python3.12  which interpreter (default: the first of python3.11, 3.12, 3.13, python3 that is 3.11 or newer)
#   JETRL_SET=cpu|gpu  which set (default: gpu where nvidia-smi lists a GPU)
#   TORCH_INDEX=URL    an extra package index with CPU builds of torch (smaller than the default CUDA build)
#   JETRL_LOCKED=1     CPU set with the hashes of requirements/*.lock (Python 3.11, Linux x86_64: the image)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "setup: no Python >= 3.11 with the venv module (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3})." >&2
  echo "setup: install one (Debian, Ubuntu: apt install python3 python3-venv) or set PYTHON=/path/to/python" >&2
  return 1
}

if [ -z "${JETRL_SET:-}" ]; then
  JETRL_SET=cpu
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then JETRL_SET=gpu; fi
fi
case "$JETRL_SET" in
  cpu) echo "setup: CPU set (FP8 is emulated, exactly)" ;;
  gpu) echo "setup: GPU set (SGLang with its own CUDA packages)" ;;
  *) echo "setup: JETRL_SET=$JETRL_SET; rule: cpu or gpu" >&2; exit 2 ;;
esac

PYTHON_BIN=$(find_python)
stamp="$VENV/.jetrl-setup"
key=$({ cat requirements/*.txt pyproject.toml tools/setup.sh; "$PYTHON_BIN" -V; echo "$JETRL_SET" "$PWD"; } | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && "$VENV/bin/python" -c 'import torch' >/dev/null 2>&1; then
  echo "setup: $VENV is up to date"
  exit 0
fi

if ! "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
  echo "setup: new environment $VENV with $("$PYTHON_BIN" -V)"
  "$PYTHON_BIN" -m venv --clear "$VENV"
fi
rm -f "$stamp"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

if [ "${JETRL_LOCKED:-0}" = 1 ]; then
  [ "$JETRL_SET" = cpu ] || { echo "setup: JETRL_LOCKED=1 with JETRL_SET=$JETRL_SET; rule: the locks are of the CPU set" >&2; exit 2; }
  echo "setup: everything, by hash"
  pip --no-deps --require-hashes -r requirements/torch.lock
  pip --no-deps --require-hashes -r requirements/cpu.lock
elif [ "$JETRL_SET" = cpu ]; then
  echo "setup: torch"
  pip -r requirements/base.txt -c requirements/cpu.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
  echo "setup: libraries"
  pip -r requirements/cpu.txt
  echo "setup: SGLang"
  pip --no-deps -r requirements/nodeps.txt
else
  echo "setup: SGLang with its dependencies"
  pip -r requirements/gpu.txt
fi
echo "setup: Megatron-Core, tools, this package"
if [ "${JETRL_LOCKED:-0}" = 1 ]; then
  pip --no-deps --require-hashes --ignore-requires-python -r requirements/megatron.lock
else
  pip --no-deps --ignore-requires-python -r requirements/nodeps-ignore-python.txt
  pip -r requirements/dev.txt
fi
pip --no-deps -e .

cuda=$("$VENV/bin/python" -c 'import torch; print(torch.version.cuda or "")')
if [ "$JETRL_SET" = cpu ] && [ -n "$cuda" ]; then
  echo "setup: torch is a CUDA $cuda build on a machine without a GPU: it works, it is only larger than needed (see TORCH_INDEX)"
fi
echo "$key" > "$stamp"
echo "setup: done, $VENV/bin/jetrl is ready"
