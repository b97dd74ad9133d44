"""Data sets as files: reading rows, and turning them into samples."""
