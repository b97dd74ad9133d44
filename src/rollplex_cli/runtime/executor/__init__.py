"""One task graph, one executor: what runs when, on which thread, and what may read the weights meanwhile."""
