"""Training by ``autoparallel run``: data, steps, logs and restarts."""
