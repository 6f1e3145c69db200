"""Modes under which the forward of a model is run and recorded while it is captured."""
