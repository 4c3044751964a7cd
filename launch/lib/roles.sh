# shellcheck shell=bash disable=SC2034 # results are variables of whoever sources this
# Roles: a job is one or more sets of processes, each a Slurm step on some of its nodes. The first to leave decides.
# Today's training job has one role, `train`, whose rank 0 starts the engines; separate engine roles use the same functions.
# Needs common.sh.

declare -A ROLE_PID=()

# container_options: sets CONTAINER, what srun gets for pyxis (enroot). Off without JETRL_CONTAINER_IMAGE.
# No --container-name: named containers stay on the node and leak state into the next job.
container_options() {
  CONTAINER=()
  [ -n "${JETRL_CONTAINER_IMAGE:-}" ] || return 0
  local folder mounts=""
  for folder in $(printf '%s\n' "$PWD" "$JETRL_ROOT" ${RUN_DIR:+"$RUN_DIR"} | sort -u); do mounts+=,$folder:$folder; done
  CONTAINER=("--container-image=$JETRL_CONTAINER_IMAGE" --no-container-mount-home "--container-workdir=$PWD"
    "--container-mounts=${mounts#,}${JETRL_CONTAINER_MOUNTS:+,$JETRL_CONTAINER_MOUNTS}")
}

# role_command NODES NAME COMMAND...: sets STEP, one task per node of the comma-separated list. --overlap: steps share the
# nodes (the checks, the roles, the cleanup); counts are explicit, since a step inherits the job's otherwise.
role_command() {
  local nodes=$1 name=$2 count
  shift 2
  count=$(tr ',' '\n' <<<"$nodes" | wc -l)
  STEP=(srun --overlap "--nodes=$count" "--ntasks=$count" --ntasks-per-node=1 "--nodelist=$nodes" "--job-name=$name"
    --kill-on-bad-exit=1 --label "${CONTAINER[@]}" "$@")
}

# start_role NAME NODES COMMAND...: in the background.
start_role() {
  local name=$1 nodes=$2
  shift 2
  role_command "$nodes" "$name" "$@"
  if dry_run; then
    show_command "${STEP[@]}"
    return
  fi
  "${STEP[@]}" &
  ROLE_PID[$name]=$!
  say "role $name on $nodes"
}

is_running() { [[ " $(jobs -rp | tr '\n' ' ') " == *" $1 "* ]]; }

# await_roles MAIN: until the first role leaves; sets FIRST and CODE. A role other than MAIN that leaves is a failure, also
# with code 0: 70. Signals interrupt the wait, their traps run, and it goes on.
await_roles() {
  local name
  while :; do
    for name in "${!ROLE_PID[@]}"; do
      is_running "${ROLE_PID[$name]}" && continue
      FIRST=$name CODE=0
      wait "${ROLE_PID[$name]}" || CODE=$?
      unset "ROLE_PID[$name]"
      if [ "$name" != "$1" ]; then
        say "role $name left with code $CODE before role $1 ended"
        [ "$CODE" -ne 0 ] || CODE=$ROLE_LEFT
      fi
      return 0
    done
    sleep 0.5 &
    wait $! || true
  done
}

# stop_roles: TERM to what is left, by step (TERM to srun itself would SIGKILL the tasks), JETRL_GRACE_S seconds, then KILL.
stop_roles() {
  local name deadline
  [ ${#ROLE_PID[@]} -gt 0 ] || return 0
  signal_roles TERM
  deadline=$((SECONDS + ${JETRL_GRACE_S:-10}))
  for name in "${!ROLE_PID[@]}"; do
    while is_running "${ROLE_PID[$name]}" && [ "$SECONDS" -lt "$deadline" ]; do
      sleep 0.2 &
      wait $! || true
    done
  done
  signal_roles KILL
  for name in "${!ROLE_PID[@]}"; do
    wait "${ROLE_PID[$name]}" || true
    unset "ROLE_PID[$name]"
  done
}

signal_roles() {
  local name step
  for name in "${!ROLE_PID[@]}"; do
    is_running "${ROLE_PID[$name]}" || continue
    for step in $(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | awk -v n="$name" '$2 == n {print $1}'); do
      scancel "--signal=$1" "$step" || true
    done
  done
}
