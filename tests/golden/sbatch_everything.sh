#!/bin/bash

# Parameters
#SBATCH --account=a
#SBATCH --comment='two words'
#SBATCH --constraint='h100&ib'
#SBATCH --contiguous
#SBATCH --cpus-per-task=96
#SBATCH --dependency=afterok:17
#SBATCH --exclude='n[1-3]'
#SBATCH --exclusive
#SBATCH --export=HF_TOKEN
#SBATCH --gres=gpu:h100:8
#SBATCH --job-name=qwen25vl7b
#SBATCH --mail-type=END
#SBATCH --mem=0
#SBATCH --nice=100
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/shared/runs/r1/logs/slurm.log
#SBATCH --partition=p
#SBATCH --qos=q
#SBATCH --requeue
#SBATCH --reservation=r
#SBATCH --signal=USR2@600
#SBATCH --time=1-12

# Run
run_dir=/shared/runs/r1
cd -- /home/user/work || exit

# Setup
source conda.sh
conda activate x
export MESSAGE='it'"'"'s $5'
export NCCL_DEBUG=INFO
export PYTHONPATH=/shared/runs/r1/code${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1

# Command
# Slurm may signal this shell too; it has to outlive the tasks.
trap : TERM USR2
code=0
srun --export=ALL --kill-on-bad-exit=0 --unbuffered --cpus-per-task=96 --container-image=image:1 --cpu-bind=none \
    apptainer exec 'my image.sif' /usr/bin/python3 -m rollplex_cli.launch.slurm.node "$run_dir" || code=$?

# Again
next=$(apptainer exec 'my image.sif' /usr/bin/python3 -m rollplex_cli.launch.slurm.finish "$run_dir" "$code" 5) || code=$?
if [ "$next" = requeue ]; then
    scontrol requeue "$SLURM_JOB_ID" && sleep 600
fi
exit "$code"
