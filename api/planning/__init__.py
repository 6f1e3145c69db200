"""Planning: from a target, a cluster and options to a plan."""
