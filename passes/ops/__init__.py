"""Ops that programs consist of: those of torch by name, and our own."""
