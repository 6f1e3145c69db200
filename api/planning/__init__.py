"""From a target, a cluster and options to a plan."""
