"""Independent price of a finished plan, node by node, without the solvers and the search."""
