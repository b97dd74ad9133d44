"""One order of what a rollout of several GPUs and the trainer beside it launch, and who is in which collective."""
