"""The memory of a rank, from programs run on fake tensors."""
