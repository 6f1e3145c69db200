"""Weights, plans and integer programs written for other software."""
