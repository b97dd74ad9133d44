"""Commands about jobs that run somewhere: check, submit, status, logs, cancel."""
