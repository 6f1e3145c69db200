"""Backwards of local programs: recomputed blocks, weight gradients apart from those of inputs."""
