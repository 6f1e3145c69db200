"""The search in proposers: each makes candidates from a context and the pool so far."""
