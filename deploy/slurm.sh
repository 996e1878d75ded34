#!/bin/bash
# Two machines with four GPUs each. Edit the lines below, then: sbatch deploy/slurm.sh recipe.yaml
# `paceline slurm RECIPE --nodes 2 --procs 4` writes such a script for a recipe; this one takes the recipe as an argument.
#SBATCH --job-name=paceline
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --requeue
set -u

# Each task is one process of the run. When one has ended, the others get time to save.
srun --kill-on-bad-exit=0 --wait=120 paceline train "${@:-quickstart}" &
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

# 75: stopped on request. The job goes back into the queue and resumes from the newest checkpoint.
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$code"
