"""Local programs: the computation of a rank, from the whole graph and the plan of its stage."""
