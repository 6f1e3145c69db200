"""Captures, plans and measured memory between commands."""
