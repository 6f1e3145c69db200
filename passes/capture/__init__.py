"""Capture of a model: exported, lowered to one op set, with ties, repeats, blocks and branches."""
