#!/bin/bash

# Parameters
#SBATCH --array=0-5%2
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --export=ALL
#SBATCH --gpus-per-node=2
#SBATCH --job-name=qwen25vl7b
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/r1/%a/logs/slurm.log
#SBATCH --partition=gpu
#SBATCH --requeue
#SBATCH --signal=USR2@600
#SBATCH --time=24:00:00

# Run
run_dir=/shared/runs/r1/"$SLURM_ARRAY_TASK_ID"
cd -- /home/user/work || exit

# Setup
export PYTHONPATH=/shared/runs/r1/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1

# Command
# Slurm may signal this shell too; it has to outlive the tasks.
trap : TERM USR2
code=0
srun --export=ALL --kill-on-bad-exit=0 --unbuffered --cpus-per-task=96 \
    /opt/venv/bin/python -m rollplex_cli.launch.slurm.node "$run_dir" || code=$?

# Again
next=$(/opt/venv/bin/python -m rollplex_cli.launch.slurm.finish "$run_dir" "$code" 5) || code=$?
if [ "$next" = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
exit "$code"
