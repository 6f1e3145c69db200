"""From the gradients of a step to new weights."""
