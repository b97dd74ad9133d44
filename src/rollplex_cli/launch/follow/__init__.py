"""Looking after runs from anywhere: what they do, what they print, and stopping them."""
