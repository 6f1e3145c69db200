"""Export of plans to other training systems: a configuration, and its differences from the plan."""
