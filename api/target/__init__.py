"""The user's model, batch and loss."""
