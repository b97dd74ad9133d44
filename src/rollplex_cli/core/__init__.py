"""Small things every layer uses: errors, units, events, logging, resource lookup."""
