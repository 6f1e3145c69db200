"""From a planning job to a plan: everything decided together."""
