"""Ranks as threads, as the package has them (``autoparallel.passes.local.simulated``)."""

from autoparallel.passes.local.simulated import ThreadCommunicator, make_communicators, run_ranks

__all__ = ["ThreadCommunicator", "make_communicators", "run_ranks"]
