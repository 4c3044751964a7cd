#!/usr/bin/env bash
# One node of a launch under Slurm: the environment, then torchrun. Arguments: those of the package's command line.
# From the job: JETRL_ROOT, JETRL_LAUNCH, JETRL_MASTER_ADDR, JETRL_MASTER_PORT, JETRL_LOG_DIR.
set -euo pipefail
. "$JETRL_ROOT/launch/lib/common.sh"
load_environment
trap '' USR1                                   # inherited: a stray USR1 to the whole job ends no engine and no agent
ulimit -Sn "$(ulimit -Hn)" || true             # engines open many files; the soft limit is often 1024
export JETRL_TAG=$JETRL_LAUNCH                 # only processes from here on carry it; cleanup.sh looks for it
torchrun_command "$SLURM_STEP_NUM_NODES" "$SLURM_NODEID" "$JETRL_MASTER_ADDR" "$JETRL_MASTER_PORT" \
  "$JETRL_LOG_DIR/node_$SLURM_NODEID" "$@"
exec "${TORCHRUN[@]}"
