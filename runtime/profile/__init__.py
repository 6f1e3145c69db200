"""Measurements: ops, links and states on real devices, and what a step takes."""
