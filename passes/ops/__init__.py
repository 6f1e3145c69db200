"""Ops that programs consist of: torch's ops by name, and our own."""
