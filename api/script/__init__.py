"""``autoparallel export PLAN --to python``: a script on plain PyTorch that trains by a plan."""
