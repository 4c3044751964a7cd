# `make quickstart` is all a new user needs. VENV=DIR uses another environment folder.
VENV ?= .venv
PY = $(VENV)/bin/python
RUN_DIR ?= runs/quickstart
export OMP_NUM_THREADS ?= 1
export VENV

.PHONY: help setup quickstart test test-fast test-launch test-nemo fuzz lint docker-lint lock format bench gpu-check \
	gpu-check-kernels bench-gpu bench-gpu-models clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup:  ## make or update the virtual environment (detects a GPU)
	@bash tools/setup.sh

quickstart: setup  ## tiny model, real Megatron-Core and SGLang, on this machine; prints reward curve and mismatch
	rm -rf -- "$(RUN_DIR)"
	$(VENV)/bin/jetrl train configs/quickstart.yaml --run-dir "$(RUN_DIR)"

test: setup  ## every test but those of launch/, files spread over 2 to 4 processes; results in build/junit.xml
	$(PY) -m pytest --ignore=tests/launch -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --junitxml=build/junit.xml --durations=25

test-fast: setup  ## tests without the slow ones
	$(PY) -m pytest -m "not slow" --durations=10

test-launch: setup  ## the launchers on a private two-node Slurm (tools/ci-packages.sh installs it); one test at a time
	$(PY) -m pytest tests/launch --ignore=tests/launch/test_nemo.py --durations=10

NEMO_VENV ?= build/nemo-venv

test-nemo: setup  ## tests of launch/nemo, in an environment of their own (about 500 MB)
	test -x "$(NEMO_VENV)/bin/pip" || $(PY) -m venv "$(NEMO_VENV)"
	"$(NEMO_VENV)/bin/pip" install --quiet nemo-run==0.11.1 leptonai==0.27.3
	JETRL_NEMO_PYTHON="$(abspath $(NEMO_VENV))/bin/python" $(PY) -m pytest tests/launch/test_nemo.py

fuzz: setup  ## 10,000 fresh cases of quantizers, GEMM, attention and a whole model
	JETRL_FUZZ_CASES=2500 $(PY) -m pytest tests/fuzz

lint: setup docker-lint  ## ruff, mypy, import layers, shell scripts, Dockerfile
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

docker-lint: setup  ## hadolint for the Dockerfile, shellcheck for every shell script
	$(VENV)/bin/hadolint Dockerfile
	$(VENV)/bin/shellcheck --severity=style --shell=bash --external-sources \
	  launch/*/*.sh launch/slurm/*.sbatch tools/*.sh .ci/run

lock: setup  ## rewrite requirements/*.lock, the hashes that the images install by
	$(PY) tools/lock.py

format: setup  ## reformat the sources
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup  ## run benchmarks/cpu_kernels.py and every benchmarks/bench_*.py
	@set -e; for file in benchmarks/cpu_kernels.py benchmarks/bench_*.py; do echo "== $$file"; $(PY) "$$file"; done

gpu-check: setup  ## kernels, then whole runs of Megatron and SGLang on the GPUs here: mismatch 0.0; fails without FP8 tensor cores
	@$(VENV)/bin/jetrl doctor --require-gpu || { \
	  echo "gpu-check: needs an NVIDIA GPU with FP8 tensor cores; nothing was checked" >&2; exit 1; }
	$(PY) -m jetrl_megatron.ops.gpu check --out build/gpu_check.json
	rm -rf build/gpu-exactness
	$(VENV)/bin/jetrl exactness --backend auto --out build/gpu-exactness
	$(PY) -m pytest tests/rollout/test_triton_exactness.py

# No `setup`: a bare machine with a GPU needs only a Python that has torch and triton (PY=python3), and no network.
GPU_PY = $(if $(wildcard $(PY)),$(PY),python3)

gpu-check-kernels:  ## GPU kernels against their references, linears, times; results in build/gpu_check.json
	$(GPU_PY) -m jetrl_megatron.ops.gpu check --out build/gpu_check.json

bench-gpu:  ## times of GPU kernels and linears only; results in build/gpu_bench.json
	$(GPU_PY) -m jetrl_megatron.ops.gpu bench --out build/gpu_bench.json

BACKEND ?= triton

bench-gpu-models: setup  ## on a GPU: block, model, training step, memory, sync of 8B, 14B and 32B shapes; rollout of 8B
	@set -e; for shape in 8B 14B 32B; do \
	  $(PY) benchmarks/bench_model.py --backend "$(BACKEND)" --shape $$shape --sequences 2 --length 2048; done; \
	for tokens in 4096 8192 16384; do \
	  $(PY) benchmarks/bench_rollout.py --backend "$(BACKEND)" --shape 8B --prompts 512 --samples 1 --concurrent 128 \
	    --prompt-tokens 512 --new-tokens $$tokens --rounds 1; done

clean:  ## remove caches and build outputs (keeps $(VENV) and runs/)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache ./*.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './.git/*' -prune -exec rm -rf {} +
