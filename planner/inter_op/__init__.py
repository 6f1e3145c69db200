"""Inter-operator planning: the blocks and devices of each pipeline stage."""
