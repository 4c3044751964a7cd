# shellcheck shell=bash disable=SC2034 # results are variables of whoever sources this
# What every launcher shares: messages, arguments, settings, commands. Source it; it prints nothing and changes nothing.
#
# Settings come from the environment. All launchers:
#   JETRL_ROOT             the repository; default: where the launcher lies (Slurm: the folder of submission)
#   JETRL_ENV              environment file: a name in launch/env/ or a path; default: h100 where GPUs are allocated, else cpu
#   JETRL_PYTHON           interpreter with the package; default: $JETRL_ROOT/.venv/bin/python, in a container python3
#   JETRL_RANKS_PER_NODE   default: the GPUs allocated per node, else 1
#   JETRL_DRY_RUN=1        print the command lines and end

USER_ERROR=2 NOT_READY=75 ROLE_LEFT=70

say() { printf 'jetrl: %s  %s\n' "$(date '+%F %T')" "$*" >&2; }

# user_error KEY=VALUE RULE FIX: the one form of a user's mistake, exit code 2.
user_error() {
  printf 'error: %s; rule: %s; fix: %s\n' "$1" "$2" "$3" >&2
  exit "$USER_ERROR"
}

dry_run() { [ "${JETRL_DRY_RUN:-0}" = 1 ]; }

# run COMMAND...: run it, or print it as a shell would read it.
run() {
  if dry_run; then show_command "$@"; else "$@"; fi
}

show_command() {
  local word line=""
  for word in "$@"; do
    case $word in
      '' | *[!A-Za-z0-9_@%+=:,./-]*) line+=" '${word//\'/\'\\\'\'}'" ;;
      *) line+=" $word" ;;
    esac
  done
  printf '%s\n' "${line# }"
}

# require_number KEY MINIMUM: the setting is a whole number.
require_number() {
  case ${!1} in
    '' | *[!0-9]*) user_error "$1=${!1}" "a whole number" "correct or unset $1" ;;
  esac
  [ "${!1}" -ge "$2" ] || user_error "$1=${!1}" "at least $2" "correct or unset $1"
}

# parse_arguments CONFIG [KEY=VALUE ...] [--run-dir DIR]: sets CONFIG, OVERRIDES, RUN_DIR (empty where not given).
parse_arguments() {
  local usage="CONFIG [key=value ...] [--run-dir DIR]"
  CONFIG="" RUN_DIR="" OVERRIDES=()
  while [ $# -gt 0 ]; do
    case $1 in
      --run-dir)
        [ $# -ge 2 ] || user_error "--run-dir" "is followed by a folder" "give it one"
        RUN_DIR=$2
        shift
        ;;
      --run-dir=*) RUN_DIR=${1#*=} ;;
      -*) user_error "$1" "$usage" "remove it; options of Slurm go before the script's name" ;;
      *) if [ -z "$CONFIG" ]; then CONFIG=$1; else OVERRIDES+=("$1"); fi ;;
    esac
    shift
  done
  [ -n "$CONFIG" ] || user_error "CONFIG missing" "$usage" "name a YAML file, e.g. configs/quickstart.yaml"
  [ -f "$CONFIG" ] || user_error "CONFIG=$CONFIG" "an existing YAML file (seen from $PWD)" "correct the path"
  local override
  for override in "${OVERRIDES[@]}"; do
    case $override in
      ?*=*) ;;
      *) user_error "$override" "$usage" "write an override as key=value" ;;
    esac
  done
}

# load_environment: reads the environment file, then settles JETRL_PYTHON and JETRL_RANKS_PER_NODE.
load_environment() {
  local gpus=${SLURM_GPUS_ON_NODE:-0} file
  case $gpus in *[!0-9]*) gpus=${gpus##*[!0-9]} ;; esac # Slurm may write "h100:8"
  if [ -z "${JETRL_ENV:-}" ]; then
    if [ "${gpus:-0}" -gt 0 ]; then JETRL_ENV=h100; else JETRL_ENV=cpu; fi
  fi
  file=$JETRL_ENV
  case $file in */*) ;; *) file=$JETRL_ROOT/launch/env/$file.sh ;; esac
  [ -f "$file" ] || user_error "JETRL_ENV=$JETRL_ENV" "a name in launch/env/ or a file" "one of: $(environment_names)"
  # shellcheck source=/dev/null
  . "$file"
  if [ "${gpus:-0}" -gt 0 ]; then : "${JETRL_RANKS_PER_NODE:=$gpus}"; else : "${JETRL_RANKS_PER_NODE:=1}"; fi
  require_number JETRL_RANKS_PER_NODE 1
  if [ -z "${JETRL_PYTHON:-}" ]; then
    if [ -n "${JETRL_CONTAINER_IMAGE:-}" ]; then JETRL_PYTHON=python3; else JETRL_PYTHON=$JETRL_ROOT/.venv/bin/python; fi
  fi
  if [ -z "${JETRL_CONTAINER_IMAGE:-}" ] && ! dry_run; then
    command -v "$JETRL_PYTHON" >/dev/null ||
      user_error "JETRL_PYTHON=$JETRL_PYTHON" "an interpreter" "run make setup in $JETRL_ROOT, or set JETRL_PYTHON"
  fi
  export JETRL_ENV JETRL_PYTHON JETRL_RANKS_PER_NODE
}

environment_names() { (cd "$JETRL_ROOT/launch/env" && printf '%s ' *.sh) | sed 's/\.sh//g; s/ $//'; }

# train_arguments: sets TRAIN, what follows the module's name. --resume goes on where the run folder is, and starts at
# step 1 in an empty one.
train_arguments() { TRAIN=(train "$CONFIG" "${OVERRIDES[@]}" --run-dir "$RUN_DIR" --resume); }

# torchrun_command NODES NODE_RANK ADDRESS PORT LOG_DIR ARGUMENTS...: sets TORCHRUN. A static rendezvous: node ranks and the
# address are known, so nothing is elected, nothing resolves host names, and two jobs cannot meet.
# --redirects --tee: the ranks write into files, so that one left behind cannot hold the job's output open.
torchrun_command() {
  local nodes=$1 rank=$2 address=$3 port=$4 logs=$5
  shift 5
  TORCHRUN=("$JETRL_PYTHON" -m torch.distributed.run "--nnodes=$nodes" "--node-rank=$rank"
    "--nproc-per-node=$JETRL_RANKS_PER_NODE" "--master-addr=$address" "--master-port=$port" --max-restarts=0
    --shutdown-timeout=5 "--log-dir=$logs" --redirects=3 --tee=3 -m "${JETRL_MODULE:-jetrl_megatron.cli}" "$@")
}

# run_phase: the phase in status.json, "none" without one. run_step: the step of the newest complete checkpoint, or 0.
run_phase() {
  local phase=""
  [ ! -f "$RUN_DIR/status.json" ] || phase=$(sed -n 's/.*"phase": *"\([a-z_-]*\)".*/\1/p' "$RUN_DIR/status.json")
  echo "${phase:-none}"
}

run_step() {
  local file step=0 found
  for file in "$RUN_DIR"/checkpoints/step_*/trainer_state.json; do
    [ -f "$file" ] || continue
    found=${file%/*} found=${found##*step_}
    [ "$((10#$found))" -le "$step" ] || step=$((10#$found))
  done
  echo "$step"
}

# new_launch FOLDER NAME: the marks of a new start: no old request to stop, a folder for this attempt's logs.
new_launch() {
  ATTEMPT_DIR=$RUN_DIR/launch/$1
  mkdir -p "$ATTEMPT_DIR" || user_error "RUN_DIR=$RUN_DIR" "a writable folder" "choose another --run-dir"
  rm -f -- "$RUN_DIR/stop.request"
  : > "$ATTEMPT_DIR/started"
}

# reached PHASE: status.json says so, and this attempt wrote it.
reached() { [ "$(run_phase)" = "$1" ] && [ "$RUN_DIR/status.json" -nt "$ATTEMPT_DIR/started" ]; }
