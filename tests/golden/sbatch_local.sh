#!/bin/bash

# Parameters
#SBATCH --export=ALL
#SBATCH --job-name=tiny-2rank
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/r1/logs/slurm.log
#SBATCH --requeue
#SBATCH --signal=USR2@60
#SBATCH --time=1:00:00

# Run
run_dir=/shared/runs/r1
cd -- /home/user/work || exit

# Setup
export PYTHONPATH=/shared/runs/r1/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1

# Command
# Slurm may signal this shell too; it has to outlive the tasks.
trap : TERM USR2
code=0
srun --export=ALL --kill-on-bad-exit=0 --unbuffered \
    /opt/venv/bin/python -m rollplex_cli.launch.slurm.node "$run_dir" || code=$?

# Again
next=$(/opt/venv/bin/python -m rollplex_cli.launch.slurm.finish "$run_dir" "$code" 3) || code=$?
if [ "$next" = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
exit "$code"
