#!/usr/bin/env bash
# A run longer than the time limit, where jobs may not be requeued: NUM jobs, one after the other, on one run folder.
#
#   launch/slurm/chain.sh NUM --run-dir DIR CONFIG [key=value ...] [-- sbatch's options]
#
# Each link continues from the last checkpoint. A link whose run is done ends at once with code 0; after
# JETRL_MAX_STALLED links that failed without a new checkpoint the others end at once with code 1.
set -euo pipefail
JETRL_ROOT=${JETRL_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
export JETRL_ROOT
. "$JETRL_ROOT/launch/lib/common.sh"

usage="NUM --run-dir DIR CONFIG [key=value ...] [-- sbatch's options]"
NUM=${1:-}
case $NUM in '' | *[!0-9]* | 0) user_error "NUM=$NUM" "$usage, NUM at least 1" "say how many jobs" ;; esac
shift
ours=() options=()
while [ $# -gt 0 ]; do
  if [ "$1" = -- ]; then
    shift
    options=("$@")
    break
  fi
  ours+=("$1")
  shift
done
parse_arguments "${ours[@]}"
[ -n "$RUN_DIR" ] || user_error "--run-dir missing" "$usage" "name the folder that the links share"
# singleton: one job of this name at a time, in order, whatever the one before ended with.
name=jetrl-chain-$(printf %s "$(realpath -m "$RUN_DIR")" | cksum | cut -d' ' -f1)
export JETRL_CHAIN=1 JETRL_ON_STOP=exit
for ((i = 0; i < NUM; i++)); do
  run sbatch --parsable --no-requeue --dependency=singleton "--job-name=$name" "${options[@]}" \
    "$JETRL_ROOT/launch/slurm/train.sbatch" "$CONFIG" "${OVERRIDES[@]}" --run-dir "$RUN_DIR"
done
