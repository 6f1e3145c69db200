"""Plans in the terms of other training systems: a configuration, and what it cannot express."""
