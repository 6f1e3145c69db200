"""Meanings of dimensions through a graph: samples, positions, padding, written-out attention."""
