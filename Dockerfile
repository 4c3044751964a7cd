# Two images from one file: `gpu` (the default, last stage) for H100 nodes, `cpu` for a machine without a GPU.
#
#   docker build --build-arg BASE_IMAGE=lmsysorg/sglang:v0.5.23@sha256:DIGEST -t jetrl .
#   docker build --target cpu -t jetrl-cpu . && docker run --rm --shm-size=2g jetrl-cpu make quickstart
#
# BASE_IMAGE has no default: name the image by digest, so that the same file builds the same image next year.
ARG BASE_IMAGE
ARG CPU_BASE_IMAGE=debian:12-slim

# ---------------------------------------------------------------------------------------------------------------- cpu
FROM ${CPU_BASE_IMAGE} AS cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG UID=1000
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ make procps python3 python3-venv util-linux \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid "${UID}" jetrl \
 && install -d -o jetrl -g jetrl /opt/jetrl
USER ${UID}
WORKDIR /opt/jetrl
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# The environment first: a change of our code does not install it anew.
COPY --chown=jetrl:jetrl requirements requirements
COPY --chown=jetrl:jetrl pyproject.toml README.md LICENSE Makefile ./
COPY --chown=jetrl:jetrl tools/setup.sh tools/setup.sh
COPY --chown=jetrl:jetrl jetrl_megatron/__init__.py jetrl_megatron/__init__.py
RUN JETRL_SET=cpu JETRL_LOCKED=1 bash tools/setup.sh && rm -rf ~/.cache/pip
COPY --chown=jetrl:jetrl . .
ENV PATH=/opt/jetrl/.venv/bin:$PATH
HEALTHCHECK --interval=60s --timeout=60s --start-period=10s \
  CMD ["/opt/jetrl/.venv/bin/python", "-c", "import torch, megatron.core, jetrl_megatron"]
CMD ["jetrl", "doctor"]

# ---------------------------------------------------------------------------------------------------------------- gpu
# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG UID=1000
ARG APEX_REPOSITORY=https://github.com/NVIDIA/apex.git
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
# CUDA of the base image's torch, which Transformer Engine's library package is named after.
ARG CUDA_MAJOR=13
ARG TRANSFORMER_ENGINE_VERSION=2.20.2
ARG FLASH_ATTN_VERSION=2.8.3.post2
ARG JETRL_COMMIT=unknown
# Compiled for Hopper only, and here: else their setup takes wheels from GitHub, unchecked, where it finds some.
# Fewer jobs for machines with little memory.
ARG MAX_JOBS=16
LABEL org.opencontainers.image.title="jetrl-megatron" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${JETRL_COMMIT}" \
      org.jetrl.apex.commit="${APEX_COMMIT}"
ENV TORCH_CUDA_ARCH_LIST=9.0a NVTE_CUDA_ARCHS=90a NVTE_FRAMEWORK=pytorch FLASH_ATTN_CUDA_ARCHS=90 \
    NVTE_PYTORCH_FORCE_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
    MAX_JOBS=${MAX_JOBS} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git ninja-build procps \
 && rm -rf /var/lib/apt/lists/*
# What has wheels: by hash. torch and sglang are the base image's; nothing here may replace them.
COPY requirements/gpu-image.lock /tmp/requirements/
RUN python3 -m pip install --no-deps --require-hashes -r /tmp/requirements/gpu-image.lock
# What is compiled against the base image's torch and CUDA: by version or commit.
RUN python3 -m pip install --no-build-isolation --no-deps \
      "transformer-engine==${TRANSFORMER_ENGINE_VERSION}" \
      "transformer-engine-cu${CUDA_MAJOR}==${TRANSFORMER_ENGINE_VERSION}" \
      "transformer-engine-torch==${TRANSFORMER_ENGINE_VERSION}" \
 && python3 -m pip install --no-build-isolation --no-deps "flash-attn==${FLASH_ATTN_VERSION}"
RUN git init --quiet /tmp/apex \
 && git -C /tmp/apex fetch --quiet --depth 1 "${APEX_REPOSITORY}" "${APEX_COMMIT}" \
 && git -C /tmp/apex checkout --quiet FETCH_HEAD \
 && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 python3 -m pip install --no-build-isolation --no-deps /tmp/apex \
 && rm -rf /tmp/apex
COPY . /opt/jetrl
WORKDIR /opt/jetrl
RUN python3 -m pip install --no-build-isolation --no-deps -e . \
 && python3 -c "import importlib.metadata as m; [print(n, m.version(n)) for n in ('torch', 'sglang', 'megatron-core', 'transformer-engine', 'sgl-deep-gemm', 'flash-attn', 'apex', 'jetrl-megatron')]"
RUN (id -u "${UID}" >/dev/null 2>&1 || useradd --create-home --uid "${UID}" jetrl) && install -d -o "${UID}" /workspace
USER ${UID}
WORKDIR /workspace
HEALTHCHECK --interval=60s --timeout=60s --start-period=60s CMD ["jetrl", "doctor", "--require-gpu"]
CMD ["jetrl", "doctor"]
