"""Analyses of a plan: comparison, cost estimate, explanation, what-if, repricing."""
