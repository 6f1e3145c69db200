"""Plans for other training systems: a configuration, and the differences from the plan."""
