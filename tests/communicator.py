"""Ranks as threads, as the package has them (``autoparallel.passes.simulated``)."""

from autoparallel.passes.simulated import ThreadCommunicator, make_communicators, run_ranks

__all__ = ["ThreadCommunicator", "make_communicators", "run_ranks"]
