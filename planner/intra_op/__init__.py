"""The best way to run a stage on one mesh."""
