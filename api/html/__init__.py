"""Self-contained HTML pages of plans, and a short form for notebooks."""

from __future__ import annotations

from autoparallel.html.document import MISSING, Sources, page, plan_notebook

__all__ = ["MISSING", "Sources", "page", "plan_notebook"]
