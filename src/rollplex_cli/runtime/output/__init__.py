"""What a run leaves for people and other programs to read."""
