"""Joint search over all decisions of a plan, from a search context to the plan."""
