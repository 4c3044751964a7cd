#!/usr/bin/env bash
# Ends what a launch left on this node: processes that carry its tag in their environment, and nothing else; then its
# staging folder. Processes are found by tag, never by name, so a neighbour's job is safe.
#
#   launch/slurm/cleanup.sh TAG [RUN_DIR]     TAG: of the launch; under Slurm JOB.RESTARTS
set -euo pipefail
TAG=${1:?"TAG missing; rule: cleanup.sh TAG [RUN_DIR]; fix: name the launch"} RUN_DIR=${2:-}

# processes: pids with this tag, of this user (others' environments cannot be read; a zombie has none).
processes() { grep -lzxF "JETRL_TAG=$TAG" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true; }

for attempt in TERM KILL; do
  mapfile -t found < <(processes)
  [ ${#found[@]} -gt 0 ] || break
  for pid in "${found[@]}"; do
    printf 'cleanup: %s to %s (%s)\n' "$attempt" "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c1-120)" >&2
    kill "-$attempt" "$pid" 2>/dev/null || true
  done
  for _ in $(seq 25); do
    mapfile -t found < <(processes)
    [ ${#found[@]} -gt 0 ] || break
    sleep 0.2
  done
done
if [ -n "$RUN_DIR" ] && [ -f "$RUN_DIR/config.resolved.yaml" ]; then
  staging=$(sed -n "s/^ *staging_dir: *['\"]\{0,1\}\([^'\"]*\).*/\1/p" "$RUN_DIR/config.resolved.yaml")
  name=jetrl-$(printf %s "$(realpath "$RUN_DIR")" | b2sum -l 64 | cut -d' ' -f1)
  for folder in "$staging/$name" "$staging/$name"-engine_*; do # the latter: of engines on other nodes than the trainer's
    [ -n "$staging" ] && [ -d "$folder" ] || continue
    printf 'cleanup: remove %s\n' "$folder" >&2
    rm -rf -- "$folder"
  done
fi
[ ${#found[@]} -eq 0 ] || { printf 'cleanup: still there: %s\n' "${found[*]}" >&2; exit 1; }
