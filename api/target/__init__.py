"""Targets: the user's model, batch and loss."""
