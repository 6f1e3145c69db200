"""Calls of a planned model: which forms they may have, and that nothing else is computed."""
