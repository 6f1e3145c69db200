"""Exports for other software: weights, plans and integer programs."""
