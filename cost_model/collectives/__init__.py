"""Collectives: seconds of each algorithm, and the algorithms as tables of messages."""
