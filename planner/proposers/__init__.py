"""The search as proposers: each makes candidates from a context and the pool so far."""
