"""Measurements for planning: the list of times to measure, and the processes that measure them."""
