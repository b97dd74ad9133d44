"""Slurm: the script of a job, its submission, what the scheduler says of it, and what runs on its nodes."""
