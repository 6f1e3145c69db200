"""Costs of a stage: its decisions, its ranges of equal blocks, recomputation, memory."""
