"""AdamW whose state lives on the host and passes through the device in chunks."""
