"""Text reports of plans."""

from __future__ import annotations

from autoparallel.report.page import EVERYTHING, ONE_SCREEN, Details, describe, print_report

__all__ = ["EVERYTHING", "ONE_SCREEN", "Details", "describe", "print_report"]
