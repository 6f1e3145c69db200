"""Costs of a plan: seconds, bytes, and where each number came from."""
