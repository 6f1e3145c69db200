"""A stage on a rank: its parameters, how they are cut and held, and their first values."""
