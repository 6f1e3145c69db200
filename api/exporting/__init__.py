"""Weights, plans and integer programs written for others."""
