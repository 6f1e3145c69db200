"""Checkpoints and files of weights: written whole, and read by any plan."""
