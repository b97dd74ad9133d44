"""The control thread: agreement with other ranks, signals, status and the stall watchdog."""
