"""Sections of a profile that are long enough for files of their own."""
