"""Priced plans of hand-written configurations."""
