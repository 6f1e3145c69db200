"""Passes over the captured graph, each checked by the runner."""
