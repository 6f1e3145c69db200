"""A Plan in, a page that a person reads out."""

from __future__ import annotations

from autoparallel.report.page import describe, print_report

__all__ = ["describe", "print_report"]
