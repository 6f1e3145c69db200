"""Writing plans without pricing what is written, which takes longer than all else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.plan import Plan
from autoparallel.systems.system import PricedConfig


@pytest.fixture
def unpriced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first candidate is written, without a price."""

    def first(
        plan: Plan, path: Path, candidates: Sequence[Configuration], *, trust: bool
    ) -> PricedConfig:
        return PricedConfig(candidates[0], reason="no price was asked for")

    monkeypatch.setattr("autoparallel.systems.system.price", first)
