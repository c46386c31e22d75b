#!/usr/bin/env bash
# Starts N processes of one run on this machine, each with its share of the devices.
#   launch/local.sh N --config=configs/full.py --workdir=runs/full [--config.KEY=VALUE]
# Ctrl-C and SIGTERM reach all of them: the run saves its state and ends with status 75, and the same command goes on.
# The port that they meet at is a free one, or PORT. PYTHON is the interpreter. On a machine with NVIDIA GPUs process i
# takes GPU i; on CPUs each process has one device, or as many as XLA_FLAGS says.
# Exit status: of the first process that failed, else 75 if any was preempted, else 0.
set -uo pipefail

if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
count=$1
shift
python=${PYTHON:-python}
if [[ -z ${PORT:-} ]]; then
    PORT=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') || exit
fi

pids=()
signalled=0
# Background processes ignore SIGINT, so that Ctrl-C too becomes a SIGTERM.
trap 'signalled=1; kill -TERM "${pids[@]}" 2>/dev/null' INT TERM

for ((index = 0; index < count; index++)); do
    if ((count > 1)) && command -v nvidia-smi >/dev/null; then
        export JAX_LOCAL_DEVICE_IDS=$index
    fi
    "$python" -m rljax.main "$@" --config.hosts.coordinator="127.0.0.1:$PORT" --config.hosts.count="$count" \
        --config.hosts.index="$index" &
    pids+=("$!")
done

status=0
for pid in "${pids[@]}"; do
    while true; do
        wait "$pid"
        code=$?
        ((signalled)) || break
        signalled=0 # a signal ended the wait, not the process
    done
    if ((code != 0 && (status == 0 || status == 75))); then
        status=$code
    fi
done
exit "$status"
