"""Prompt groups: which of them a step starts, and what is learned from them."""
