#!/bin/bash

# Parameters
#SBATCH --account=research
#SBATCH --constraint=hbm3
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --export=ALL
#SBATCH --gpus-per-node=8
#SBATCH --job-name=qwen25vl32b
#SBATCH --mem=0
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/r1/logs/slurm.log
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@900
#SBATCH --switches=1@12:00:00
#SBATCH --time=2-00:00:00

# Run
run_dir=/shared/runs/r1
cd -- /home/user/work || exit

# Setup
module purge
module load cuda/12.9
export NCCL_NVLS_ENABLE=0
export NCCL_SOCKET_IFNAME=ib0
export PYTHONPATH=/shared/runs/r1/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1

# Command
# Slurm may signal this shell too; it has to outlive the tasks.
trap : TERM USR2
code=0
srun --export=ALL --kill-on-bad-exit=0 --unbuffered --cpus-per-task=96 \
    /opt/venv/bin/python -m rollplex_cli.launch.slurm.node "$run_dir" || code=$?

# Again
next=$(/opt/venv/bin/python -m rollplex_cli.launch.slurm.finish "$run_dir" "$code" 10) || code=$?
if [ "$next" = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
exit "$code"
