#!/usr/bin/env bash
# A run, or a point of a sweep, as a SLURM job that goes on after preemption. Submit it from the repository's folder:
#   sbatch --nodes=2 launch/slurm.sh --config=configs/full.py --workdir=/shared/runs/full
#   sbatch --array=0-8 --nodes=1 --ntasks-per-node=1 launch/slurm.sh configs/sweeps/learning_rate.py --workdir=/shared/s
# One task is one process of jax, which under SLURM takes one GPU: --ntasks-per-node is the number of GPUs of a node.
# --workdir is in a file system that all nodes share. PYTHON is the interpreter.
# Two minutes before the time limit, and when the job is preempted, its tasks get SIGTERM: the run saves its state and
# ends with status 75, and the job is requeued. Any other status ends it.
#SBATCH --job-name=rljax
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --ntasks-per-node=1
set -uo pipefail

python=${PYTHON:-python}
if [[ " $* " != *" --workdir="* ]]; then
    echo "error: --workdir is missing; name a folder that all nodes share, so that a requeued job goes on there" >&2
    exit 2
fi
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
    srun --nodes=1 --ntasks=1 "$python" launch/sweep.py "$@" --point="$SLURM_ARRAY_TASK_ID"
else
    job=$SLURM_JOB_ID
    # A task that ends first must not take the others' time to save with it.
    srun --kill-on-bad-exit=0 "$python" -m rljax.main "$@" --config.hosts.cluster=slurm
fi
status=$?
if ((status == 75)); then
    scontrol requeue "$job"
fi
exit "$status"
