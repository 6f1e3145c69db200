"""Graph in, graph out: capture and normalize; then, given a plan, cut and localize."""
