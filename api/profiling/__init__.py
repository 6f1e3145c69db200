"""Measurements that a plan asks for: what to measure, and the processes that do."""
