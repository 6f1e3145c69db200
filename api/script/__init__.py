"""``autoparallel export PLAN --to python``: a plain PyTorch script that trains by a plan."""
