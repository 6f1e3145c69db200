"""Proposers of the search: each makes candidates from a search context and the pool so far."""
