"""Analyses of a plan: comparison, cost estimate, explanation, what-if, pricing from the model."""
