"""The ranks of a training group at work together: groups, order, responses, weights."""
