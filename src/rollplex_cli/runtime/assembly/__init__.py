"""Putting a rank together from a profile."""
