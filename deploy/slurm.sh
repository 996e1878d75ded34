#!/bin/bash
# Trains on Slurm: saves before the time limit, goes back into the queue, and resumes.
#     sbatch deploy/slurm.sh train RECIPE key=value
# Change the resources here, or give them to sbatch. Each task is a process of the run, with a GPU of its own.
#SBATCH --job-name=paceline
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# When one task has ended, the others get time to save.
srun --kill-on-bad-exit=0 --wait=120 paceline "$@" &
step=$!

# 120 s before the time limit this script gets SIGUSR1; srun forwards it, and the run saves its state.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM

# A signal interrupts `wait` with a code above 128 while the step continues.
wait "$step"
code=$?
while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do
    wait "$step"
    code=$?
done
if [ "$code" -gt 128 ]; then
    wait "$step"
    code=$?
fi

if [ "$code" -eq 75 ]; then
    echo "stopped before the end: requeued, to resume from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
