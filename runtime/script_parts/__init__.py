"""Definitions that ``autoparallel export --to python`` copies into a script of plain PyTorch.

A script gets unchanged copies of the definitions that it uses, directly or indirectly. So nothing
here imports this package, or anything that a script may not need.
"""
