"""From a planning context to a plan: everything decided together."""
