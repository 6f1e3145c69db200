"""Initial values of parameters, computed for the shards of each rank only."""
