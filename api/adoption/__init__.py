"""A script's own model: planned at its first batch, and trained in the script's loop."""
