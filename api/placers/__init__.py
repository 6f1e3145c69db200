"""Learned placers: an extension that finds pipelines by reinforcement learning."""
