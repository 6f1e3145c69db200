"""``autoparallel run``: data, steps, logs, restarts."""
