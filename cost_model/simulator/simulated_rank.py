"""The state of one pipeline rank while a schedule is simulated (see ``simulator``)."""

from __future__ import annotations

from .actions import BACKWARD, FORWARD, WEIGHT_BACKWARD, Action, Row
from .overlap import Collectives
from .timeline import Event


class SimulatedRank:
    """The state of one rank: its place in its row, its clock, its books."""

    def __init__(self, row: Row, zero: float, static_bytes: int) -> None:
        self.row = row
        self.at = 0
        self.clock = self.ended = zero
        self.busy = zero
        self.inside = zero
        self.messages = zero
        self.gradient_sync = zero
        self.gather = zero
        self.static = self.held = static_bytes
        self.events: list[Event] = []
        self.memory: list[tuple[float, int]] = [(zero, static_bytes)]
        self.collectives: Collectives | None = None
        self.beside: set[Action] = set()
        self.first_forwards: dict[int, Action] = {}
        self.last_backwards: dict[int, Action] = {}
        for action in row:
            if action.kind == FORWARD:
                self.first_forwards.setdefault(action.stage, action)
            elif action.kind in (BACKWARD, WEIGHT_BACKWARD):
                self.last_backwards[action.stage] = action

    def call(self, seconds: float) -> None:
        """The rank's own time to send a message or to post a receive."""
        self.clock += seconds
        self.messages += seconds
