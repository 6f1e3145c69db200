"""What ``autoparallel doctor`` finds: facts of a machine, checks of them, and of a cluster."""
