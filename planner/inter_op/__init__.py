"""Blocks and devices of pipeline stages."""
