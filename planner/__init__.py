"""From a graph and a cluster to a plan. Pure: the same arguments give the same answer."""
