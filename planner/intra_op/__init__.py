"""Layouts, ZeRO stage and recomputation of a stage on one mesh."""
