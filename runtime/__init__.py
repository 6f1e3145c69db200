"""Training by a plan on real processes; the only package that touches torch.distributed."""
