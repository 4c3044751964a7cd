#!/usr/bin/env bash
# Are all nodes of this job fit? Runs `jetrl nodes report` (`jetrl doctor --json` and a few facts) once on each, then says
# what is wrong on which, for all of them, not only the first. Exit code 75 if anything is.
#
#   launch/slurm/preflight.sh [FOLDER]      inside a job or salloc; FOLDER keeps the reports
set -euo pipefail
JETRL_ROOT=${JETRL_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
export JETRL_ROOT
. "$JETRL_ROOT/launch/lib/common.sh"
. "$JETRL_ROOT/launch/lib/roles.sh"
load_environment
if [ -z "${SLURM_JOB_NODELIST:-}" ]; then
  dry_run || user_error "SLURM_JOB_NODELIST unset" "runs inside a Slurm job" "salloc --nodes=N, then run it there"
  NODES=${JETRL_DRY_NODES:-node1,node2}
else
  NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
fi
FOLDER=${1:-${JETRL_RUN_DIR:-$PWD/runs}/launch/nodes-${SLURM_JOB_ID:-1}}
case $FOLDER in /*) ;; *) FOLDER=$PWD/$FOLDER ;; esac
if ! dry_run; then
  rm -rf -- "$FOLDER"
  mkdir -p "$FOLDER"
fi
container_options
JETRL=("$JETRL_PYTHON" -m jetrl_megatron.cli nodes)
# A node that cannot even answer must not keep the others from being judged: the step's code does not count.
role_command "$NODES" preflight bash "$JETRL_ROOT/launch/lib/node_report.sh" "$FOLDER"
if dry_run; then
  show_command "${STEP[@]}"
else
  timeout --signal=KILL "${JETRL_PREFLIGHT_S:-180}" "${STEP[@]/#--kill-on-bad-exit=1/--kill-on-bad-exit=0}" \
    >"$FOLDER/step.log" 2>&1 || true
fi
role_command "${NODES%%,*}" judge "${JETRL[@]}" judge "$FOLDER" --expect "$NODES" --gpus "${SLURM_GPUS_ON_NODE:-0}"
run "${STEP[@]}"
