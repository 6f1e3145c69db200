"""``autoparallel doctor``: facts of a machine, and checks of machines and of clusters."""
