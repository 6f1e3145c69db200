"""Configurations written by hand, priced."""
