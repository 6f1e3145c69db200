"""Op rules: each op's possible splits, its work, and the tensors that autograd keeps for it."""

from .saved import kept_extra_bytes, saved, saved_extra_bytes
from .storage import storage_of
from .strategies import axis_strategies, has_rule, strategies_form
from .table import RULES
from .work import Work, work

__all__ = [
    "RULES",
    "Work",
    "axis_strategies",
    "has_rule",
    "kept_extra_bytes",
    "saved",
    "saved_extra_bytes",
    "storage_of",
    "strategies_form",
    "work",
]
