"""Decode and training on one GPU at once: streams, and when it pays."""
