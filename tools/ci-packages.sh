#!/usr/bin/env bash
# System packages of the tests: a Slurm to run the launchers in, and the headers of its plugins. Installs what is missing,
# as root, on Debian and Ubuntu.
# The packages' daemons are not started: the tests start their own, with their own configuration.
set -euo pipefail
missing=()
for package in slurm-wlm munge libslurm-dev; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "ci-packages: slurm-wlm, munge and libslurm-dev are installed"
  exit 0
fi
if [ "$(id -u)" != 0 ]; then
  echo "ci-packages: missing: ${missing[*]}; rule: installed for tests/launch; fix: as root, apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 2
fi
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then # 101: the packages' scripts may start nothing
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod 755 "$policy"
  trap 'rm -f -- "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -o DPkg::Lock::Timeout=300 update -q
apt-get -o DPkg::Lock::Timeout=300 install -q -y --no-install-recommends "${missing[@]}"
