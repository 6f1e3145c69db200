"""Local programs: what a rank computes, from the whole graph and the plan of its stage."""
