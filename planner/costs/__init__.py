"""Prices of single nodes on a mesh: strategies, seconds, collectives, resharding, bytes kept."""
