#!/usr/bin/env bash
# Runs a training on all hosts of a Cloud TPU slice, and starts it again after a preemption that leaves the slice alive.
#   launch/tpu_pod.sh NAME ZONE --config=configs/full.py --workdir=/mnt/shared/runs/full [--config.KEY=VALUE]
# Each host has this repository, installed, in the folder FOLDER (rljax), and --workdir is on a file system that all
# hosts mount, such as Filestore. PROJECT is the cloud project, if it is not gcloud's own.
# Exit status: gcloud's.
set -uo pipefail

if (($# < 3)); then
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
name=$1 zone=$2
shift 2
if [[ " $* " != *" --workdir="* ]]; then
    echo "error: --workdir is missing; name a folder on a file system that all hosts mount" >&2
    exit 2
fi
run="python3 -m rljax.main$(printf ' %q' "$@") --config.hosts.cluster=gcetpu"
command="cd ${FOLDER:-rljax} && while true; do $run; status=\$?; [ \$status -eq 75 ] || exit \$status; done"
project=()
if [[ -n ${PROJECT:-} ]]; then
    project=(--project="$PROJECT")
fi
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" "${project[@]}" --worker=all --command="$command"
