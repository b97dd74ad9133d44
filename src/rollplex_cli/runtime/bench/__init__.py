"""Benchmarks: schedules and sharing policies against each other on the same work."""
