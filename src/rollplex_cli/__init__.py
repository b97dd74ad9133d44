"""Rollplex: post-training of vision-language models with rollout and training overlapped on the same GPUs."""
