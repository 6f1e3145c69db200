"""Calls of a planned model: the accepted forms, and errors for all other computations."""
