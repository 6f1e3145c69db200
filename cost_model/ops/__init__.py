"""Seconds of single ops, and bytes of states."""
