"""Measurements of ops, links and states on real devices, and of a step's memory and time."""
