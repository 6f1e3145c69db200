"""The search in proposers: each makes candidates from a job and the pool so far."""
