"""Reads a run's files and shows them: live view, tables, pictures, traces. Loads no engine and changes no run."""
