"""``autoparallel export PLAN --to python``: a script of plain PyTorch that trains by a plan."""
