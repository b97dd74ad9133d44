"""Everything that can be known of a job before a GPU is held."""
