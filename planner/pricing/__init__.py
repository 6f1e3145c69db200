"""Pricing of ops, layouts, conversions and whole runs of blocks on a mesh."""
