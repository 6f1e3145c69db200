"""``autoparallel doctor``: facts of a machine, checks of them, and of a cluster."""
