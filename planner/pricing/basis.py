"""What prices rest on besides the cluster's own figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...cost_model.cluster import Source
from ...cost_model.profile.lookup import Profile
from .asked import Asked
from .assumptions import RUNTIME, CostAssumptions

Mode = Literal["auto", "measured", "analytic"]
"""``auto``: measured, else interpolated, else from specifications; ``measured``: every op that
the search asks for must have been measured; ``analytic``: specifications alone."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Measurements and how they are used. ``asked`` records every question.

    With ``only``, seconds that come from elsewhere count as none. ``assumptions``: what is trained
    by another program's rules.
    """

    profile: Profile | None = None
    mode: Mode = "auto"
    asked: Asked | None = None
    only: Source | None = None
    assumptions: CostAssumptions = RUNTIME

    @property
    def used(self) -> Profile | None:
        """The profile that prices come from."""
        return None if self.mode == "analytic" else self.profile


DEFAULT = Basis()
"""No measurements."""
