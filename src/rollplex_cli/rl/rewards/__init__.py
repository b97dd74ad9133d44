"""Rewards: built-in types, users' functions, and the guard around all of them."""

from rollplex_cli.rl.rewards.guard import RewardFunction, RewardResult, exact_answer_parts, score

__all__ = ["RewardFunction", "RewardResult", "exact_answer_parts", "score"]
