"""Which blocks make a stage, and on which devices."""
