"""Intra-operator planning: layouts, ZeRO stage and recomputation of a stage on one mesh."""
