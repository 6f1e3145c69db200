"""Prices of configurations that the user writes by hand."""
