"""Calls of a planned model: their accepted forms, and guards against any other computation."""
