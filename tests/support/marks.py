"""Marks of single cases of a parametrized test."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def slow(*values: object) -> ParameterSet:
    """Return a case with these values that the default suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
