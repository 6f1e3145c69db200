"""Training of a script's own model: planned at its first batch, trained in the script's loop."""
