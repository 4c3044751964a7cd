#!/usr/bin/env bash
# Trains without Slurm: on this machine, or, started on each of several, on all of them.
#
#   launch/torchrun/run.sh CONFIG [key=value ...] [--run-dir DIR]
#   JETRL_NNODES=2 JETRL_NODE_RANK=0 JETRL_MASTER_ADDR=10.0.0.1 JETRL_MASTER_PORT=29400 launch/torchrun/run.sh CONFIG ...
#
# The run folder must be shared. USR1 to this script: checkpoint after the current step, then end with code 0. TERM: end
# now. Exit codes: 0 done or stopped as asked, 1 failed, 2 user's error, 143 TERM. `jetrl train` alone does the same on one
# machine; this adds the environment file, the ranks' log files, and other machines.
set -euo pipefail
JETRL_ROOT=${JETRL_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
export JETRL_ROOT
. "$JETRL_ROOT/launch/lib/common.sh"

parse_arguments "$@"
if command -v nvidia-smi >/dev/null 2>&1; then
  : "${SLURM_GPUS_ON_NODE:=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)}"
fi
load_environment
: "${JETRL_NNODES:=1}" "${JETRL_NODE_RANK:=0}"
require_number JETRL_NNODES 1
require_number JETRL_NODE_RANK 0
[ "$JETRL_NODE_RANK" -lt "$JETRL_NNODES" ] ||
  user_error "JETRL_NODE_RANK=$JETRL_NODE_RANK" "below JETRL_NNODES=$JETRL_NNODES" "number the machines from 0"
if [ "$JETRL_NNODES" -eq 1 ]; then
  JETRL_MASTER_ADDR=127.0.0.1
  if [ -z "${JETRL_MASTER_PORT:-}" ]; then
    JETRL_MASTER_PORT=29400
    dry_run || JETRL_MASTER_PORT=$("$JETRL_PYTHON" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
  fi
else
  for key in JETRL_MASTER_ADDR JETRL_MASTER_PORT; do
    [ -n "${!key:-}" ] || user_error "$key unset" "with JETRL_NNODES=$JETRL_NNODES all machines name node 0 and one port" "set $key"
  done
fi
require_number JETRL_MASTER_PORT 1024
name=${CONFIG##*/}
RUN_DIR=${RUN_DIR:-${JETRL_RUN_DIR:-runs/${name%.*}}}
case $RUN_DIR in /*) ;; *) RUN_DIR=$PWD/$RUN_DIR ;; esac
train_arguments
launch_id=$(date +%Y%m%d-%H%M%S)-$$
logs=$RUN_DIR/launch/$launch_id/node_$JETRL_NODE_RANK
dry_run && logs=$RUN_DIR/launch/START/node_$JETRL_NODE_RANK
torchrun_command "$JETRL_NNODES" "$JETRL_NODE_RANK" "$JETRL_MASTER_ADDR" "$JETRL_MASTER_PORT" "$logs" "${TRAIN[@]}"
if dry_run; then
  show_command "${TORCHRUN[@]}"
  exit 0
fi
"$JETRL_PYTHON" -m "${JETRL_MODULE:-jetrl_megatron.cli}" check "$CONFIG" "${OVERRIDES[@]}" --run-dir "$RUN_DIR" >/dev/null || exit $?
new_launch "$launch_id"
ulimit -Sn "$(ulimit -Hn)" || true

WHY=""
trap 'WHY=stop; say "asked to stop after this step"; : > "$RUN_DIR/stop.request"' USR1
trap 'WHY=term; kill -TERM "$PID" 2>/dev/null || true' TERM INT HUP
(
  trap '' USR1
  trap - TERM INT HUP
  export JETRL_TAG=$launch_id
  exec "${TORCHRUN[@]}"
) &
PID=$! CODE=0
while :; do # a trap ends `wait`, not the training
  CODE=0
  wait "$PID" || CODE=$?
  [[ " $(jobs -rp | tr '\n' ' ') " == *" $PID "* ]] || break
done
bash "$JETRL_ROOT/launch/slurm/cleanup.sh" "$launch_id" "$RUN_DIR" || true
[ "$WHY" != term ] || exit 143
if [ "$CODE" -eq 0 ] && { reached 'done' || reached stopped; }; then exit 0; fi
say "torchrun ended with code $CODE; $RUN_DIR: step $(run_step), $(run_phase)"
exit 1
