#!/usr/bin/env bash
# One node's part of launch/slurm/preflight.sh: FOLDER/NODE.json.
set -euo pipefail
. "$JETRL_ROOT/launch/lib/common.sh"
load_environment
ulimit -Sn "$(ulimit -Hn)" || true # as lib/node.sh will
exec "$JETRL_PYTHON" -m jetrl_megatron.cli nodes report "$1" --node "$SLURMD_NODENAME" --port "${JETRL_MASTER_PORT:-0}"
