"""Training by a plan on real processes; the only room that touches torch.distributed."""
