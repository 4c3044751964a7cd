# shellcheck shell=bash disable=SC2034 # results are variables of whoever sources this
# The life of one Slurm training job: check, run, and then done, requeued or failed. Needs common.sh and roles.sh.
#
# Settings of jobs, besides those in common.sh:
#   JETRL_PREFLIGHT=0        skip the check of all nodes before the start
#   JETRL_ON_STOP            requeue (default) or exit: what follows when the time limit is near and the checkpoint written
#   JETRL_MAX_REQUEUE        default 50
#   JETRL_MAX_STALLED        failed attempts in a row without a new checkpoint after which nothing is started; default 2
#   JETRL_GRACE_S            seconds between TERM and KILL of what is left; default 10
#   JETRL_CONTAINER_IMAGE    run everything in this image with pyxis/enroot; JETRL_CONTAINER_MOUNTS=SRC:DST[,...] adds mounts
#
# Exit codes: 0 done (or stopped as asked), 1 failed, 2 user's error, 70 a server role left early, 75 nodes not fit,
# 143 ended from outside (preempted, cancelled).

WHY="" CONTAINER=()

# training_job CONFIG [KEY=VALUE ...] [--run-dir DIR]
training_job() {
  parse_arguments "$@"
  load_environment
  job_settings
  job_place
  if ! dry_run; then
    begin_attempt
    trap 'WHY=${WHY:-stop}; say "time limit near: asked to stop after this step"; : > "$RUN_DIR/stop.request"' USR1
    trap 'WHY=term; say "TERM"' TERM
    trap cleanup_nodes EXIT
  fi
  container_options
  preflight_nodes
  check_configuration
  train_arguments
  if dry_run; then
    # shellcheck disable=SC2016 # printed as it stands: it differs from node to node
    torchrun_command "$NUM_NODES" '$SLURM_NODEID' "$JETRL_MASTER_ADDR" "$JETRL_MASTER_PORT" "$JETRL_LOG_DIR" "${TRAIN[@]}"
    start_role train "$NODES" bash "$JETRL_ROOT/launch/lib/node.sh" "${TRAIN[@]}"
    show_command "${TORCHRUN[@]}" | sed 's/^/  on each node: /'
    cleanup_command
    return 0
  fi
  start_role train "$NODES" bash "$JETRL_ROOT/launch/lib/node.sh" "${TRAIN[@]}"
  await_roles train
  stop_roles
  end_attempt
}

job_settings() {
  : "${JETRL_ON_STOP:=requeue}" "${JETRL_MAX_REQUEUE:=50}" "${JETRL_MAX_STALLED:=2}" "${JETRL_GRACE_S:=10}"
  case $JETRL_ON_STOP in
    requeue | exit) ;;
    *) user_error "JETRL_ON_STOP=$JETRL_ON_STOP" "requeue or exit" "correct or unset it" ;;
  esac
  require_number JETRL_MAX_REQUEUE 0
  require_number JETRL_MAX_STALLED 1
  require_number JETRL_GRACE_S 0
}

# job_place: nodes, address and port of the rendezvous, folders.
job_place() {
  if [ -z "${SLURM_JOB_ID:-}" ]; then
    dry_run || user_error "SLURM_JOB_ID unset" "runs as a Slurm job" "sbatch $0 $CONFIG, or launch/torchrun/run.sh without Slurm"
    SLURM_JOB_ID=1
  fi
  if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
    # Node names need not resolve on the nodes; Slurm's own address does. No fallback: a wrong one would make each node a
    # world of its own that waits for the others.
    JETRL_MASTER_ADDR=${JETRL_MASTER_ADDR:-$(scontrol show node -o "${NODES%%,*}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')}
  else
    NODES=${JETRL_DRY_NODES:-node1,node2} JETRL_MASTER_ADDR=${NODES%%,*}
  fi
  [ -n "$JETRL_MASTER_ADDR" ] || user_error "NodeAddr of ${NODES%%,*} unknown" "scontrol show node names it" "set JETRL_MASTER_ADDR"
  NUM_NODES=$(tr ',' '\n' <<<"$NODES" | wc -l)
  JETRL_MASTER_PORT=${JETRL_MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
  local name=${CONFIG##*/}
  RUN_DIR=${RUN_DIR:-${JETRL_RUN_DIR:-runs/${name%.*}-$(job_name_id)}}
  case $RUN_DIR in /*) ;; *) RUN_DIR=$PWD/$RUN_DIR ;; esac
  ATTEMPT=$(job_name_id)-${SLURM_RESTART_COUNT:-0}
  ATTEMPT_DIR=$RUN_DIR/launch/$ATTEMPT
  JETRL_LOG_DIR=$ATTEMPT_DIR/ranks JETRL_LAUNCH=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  export JETRL_MASTER_ADDR JETRL_MASTER_PORT JETRL_LOG_DIR JETRL_LAUNCH
}

# job_name_id: as squeue names the job; the elements of an array are ARRAY_ELEMENT.
job_name_id() {
  if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then echo "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; else echo "$SLURM_JOB_ID"; fi
}

begin_attempt() {
  say "=== attempt ${SLURM_RESTART_COUNT:-0} of job $(job_name_id) on $NODES, $JETRL_RANKS_PER_NODE ranks each;" \
    "$RUN_DIR: step $(run_step), $(run_phase)"
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || [ "${JETRL_CHAIN:-0}" = 1 ]; then
    if [ "$(run_phase)" = 'done' ]; then
      say "the run is done already"
      exit 0
    fi
    if [ "$(stalled)" -ge "$JETRL_MAX_STALLED" ]; then
      say "$(stalled) attempts failed without a new checkpoint; rule: JETRL_MAX_STALLED=$JETRL_MAX_STALLED;" \
        "fix: see the logs under $RUN_DIR/launch, then remove $RUN_DIR/launch/stalled"
      exit 1
    fi
  fi
  new_launch "$ATTEMPT"
  FIRST_STEP=$(run_step)
}

stalled() { cat "$RUN_DIR/launch/stalled" 2>/dev/null || echo 0; }

# count_stall CODE: failed attempts in a row without progress; a user's error will not heal, so it fills the count.
count_stall() {
  if [ "$(run_step)" -gt "$FIRST_STEP" ]; then
    rm -f -- "$RUN_DIR/launch/stalled"
  elif [ "$1" -eq "$USER_ERROR" ]; then
    echo "$JETRL_MAX_STALLED" > "$RUN_DIR/launch/stalled"
  else
    echo $(($(stalled) + 1)) > "$RUN_DIR/launch/stalled"
  fi
}

fail_attempt() {
  count_stall "$1"
  exit "$1"
}

preflight_nodes() {
  [ "${JETRL_PREFLIGHT:-1}" = 1 ] || return 0
  local code=0
  JETRL_RUN_DIR=$RUN_DIR bash "$JETRL_ROOT/launch/slurm/preflight.sh" "$ATTEMPT_DIR/nodes" || code=$?
  [ "$code" -eq 0 ] || exit "$code"
}

# check_configuration: on one node, without torch, so that a user's mistake costs seconds and its exit code is 2.
check_configuration() {
  local code=0
  role_command "${NODES%%,*}" check "$JETRL_PYTHON" -m "${JETRL_MODULE:-jetrl_megatron.cli}" check "$CONFIG" \
    "${OVERRIDES[@]}" --run-dir "$RUN_DIR"
  if dry_run; then
    show_command "${STEP[@]}"
    return 0
  fi
  "${STEP[@]}" >"$ATTEMPT_DIR/check.log" 2>&1 || code=$?
  [ "$code" -eq 0 ] && return 0
  cat "$ATTEMPT_DIR/check.log" >&2
  [ "$WHY" != term ] || exit 143
  fail_attempt "$code"
}

# end_attempt: what the job's state becomes. Markers in the run folder decide, not codes: srun's code is the maximum over
# its tasks, and the tasks that it ends itself count too.
end_attempt() {
  say "role $FIRST left with code $CODE; step $(run_step), $(run_phase)"
  if reached 'done'; then
    rm -f -- "$RUN_DIR/launch/stalled"
    exit 0
  fi
  if [ "$WHY" = term ]; then
    exit 143 # preempted, requeued or cancelled by someone else: leave at once, Slurm knows what follows
  fi
  if reached stopped; then
    requeue_or_exit
  fi
  [ "$CODE" -ne 0 ] || say "the trainer ended without being done or asked to stop"
  case $CODE in "$ROLE_LEFT") ;; *) CODE=1 ;; esac
  fail_attempt "$CODE"
}

requeue_or_exit() {
  rm -f -- "$RUN_DIR/launch/stalled"
  if [ "$WHY" != stop ] || [ "$JETRL_ON_STOP" = exit ]; then
    exit 0
  fi
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$JETRL_MAX_REQUEUE" ]; then
    say "requeued $SLURM_RESTART_COUNT times; rule: JETRL_MAX_REQUEUE=$JETRL_MAX_REQUEUE; fix: submit again with --run-dir $RUN_DIR"
    exit 1
  fi
  say "requeue"
  cleanup_nodes
  scontrol requeue "$(job_name_id)" || { say "not requeued; fix: submit again with --run-dir $RUN_DIR"; exit 1; }
  sleep 30 # Slurm ends this script
  exit 0
}

cleanup_command() {
  local CONTAINER=() # on the node itself
  role_command "$NODES" cleanup bash "$JETRL_ROOT/launch/slurm/cleanup.sh" "$JETRL_LAUNCH" "$RUN_DIR"
  if dry_run; then show_command "${STEP[@]}"; else "${STEP[@]}"; fi
}

# cleanup_nodes: whatever an attempt left on its nodes goes, once. Not after TERM: Slurm ends everything then, soon.
cleanup_nodes() {
  trap - EXIT
  [ "$WHY" != term ] || return 0
  cleanup_command || say "cleanup failed"
}
