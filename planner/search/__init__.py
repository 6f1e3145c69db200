"""Joint planning of all decisions, from a planning context to a plan."""
