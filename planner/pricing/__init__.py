"""What ops, layouts, conversions and whole runs of blocks cost on a mesh."""
