#!/bin/bash
# What the tests need beside Python: installed from Debian's packages when missing (as root), else named.
# usage: test-packages.sh [GROUP_LEFT_OUT …]
set -euo pipefail
without=" $* "
missing=()
need() { # group program package…
  local group=$1 program=$2; shift 2
  [[ $without == *" $group "* ]] && return
  command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || missing+=("$@")
}
need browser chromium chromium fonts-dejavu-core
need slurm slurmctld slurmctld slurmd slurm-client slurmrestd munge slurm-wlm-basic-plugins slurm-wlm-jwt-plugin
need prometheus prometheus prometheus
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" != 0 ]; then
  echo "gpuportal: the tests need these packages: ${missing[*]}" >&2
  echo "Install them (apt-get install ${missing[*]}), or leave their groups out: make test WITHOUT=\"browser slurm prometheus\"" >&2
  exit 2
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
