"""Exchanges beside compute, against a clock that runs both resources by steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import pytest

from autoparallel.cost_model.collectives.dispatch import hidden_seconds


@dataclass
class Clock:
    """Exchanges one after the other, compute one after the other; both wait for others by name."""

    slowed_share: float
    exchanges: list[tuple[str, float, tuple[str, ...]]]
    compute: list[tuple[str, float, tuple[str, ...]]]
    done: set[str] = field(default_factory=set)

    def run(self) -> float:
        now, queues = 0.0, [list(self.exchanges), list(self.compute)]
        left = [queue[0][1] if queue else 0.0 for queue in queues]
        while any(queues):
            runs = [bool(q) and self.done.issuperset(q[0][2]) for q in queues]
            rates = [1.0, 1 - self.slowed_share * runs[0]]
            ends = [
                at / rate if rate else float("inf") if at else 0.0
                for at, rate, on in zip(left, rates, runs, strict=True)
                if on
            ]
            passed = min(ends)
            now += passed
            for each in (0, 1):
                if runs[each]:
                    left[each] -= passed * rates[each]
                    if left[each] <= 1e-12:
                        self.done.add(queues[each].pop(0)[0])
                        left[each] = queues[each][0][1] if queues[each] else 0.0
        return now


def timed(first: float, compute: float, last: float, others: float, a: float, *, way: str) -> float:
    """A layer in one part or two, forward or backward, with the other ops and each wait for what it
    needs: others run once the first exchange has started, and the experts after them."""
    if way == "whole":
        exchanges = [("f", first, ()), ("l", last, ("c",))]
        return Clock(a, exchanges, [("o", others, ()), ("c", compute, ("f",))]).run()
    if way == "forward":
        exchanges = [("f1", first, ()), ("f2", first, ()), ("l1", last, ("c1",))]
        exchanges.append(("l2", last, ("c2",)))
        steps = [("o", others, ()), ("c1", compute, ("f1",)), ("c2", compute, ("f2",))]
        return Clock(a, exchanges, steps).run()
    exchanges = [("l2", last, ()), ("l1", last, ()), ("f2", first, ("c2",)), ("f1", first, ("c1",))]
    steps = [("c2", compute, ("l2",)), ("c1", compute, ("l1",)), ("o", others, ())]
    return Clock(a, exchanges, steps).run()


SECONDS = (1.0, 2.5, 7.0)


@pytest.mark.parametrize("slowed_share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("way", ["whole", "forward", "backward"])
def test_the_hidden_seconds_are_those_of_two_resources(way: str, slowed_share: float) -> None:
    for first, compute, last, others in product(SECONDS, SECONDS, SECONDS, (0.0, *SECONDS)):
        halved = way != "whole"
        parts = 1 + halved
        whole = parts * (first + compute + last) + others
        took = timed(first, compute, last, others, slowed_share, way=way)
        hidden = hidden_seconds(
            first, compute, last, others=others, slowed_share=slowed_share, halved=halved
        )
        assert whole - hidden == pytest.approx(took)


def test_more_compute_beside_an_exchange_never_shortens_the_layer() -> None:
    """So a lower bound of the other ops hides no more than they do."""
    for first, compute, last in product(SECONDS, repeat=3):
        found = [
            hidden_seconds(first, compute, last, others=o, slowed_share=0.2, halved=True)
            for o in (0.0, *SECONDS)
        ]
        assert found == sorted(found)


def test_nothing_is_hidden_where_compute_stops_meanwhile() -> None:
    for halved in (False, True):
        assert hidden_seconds(3.0, 2.0, 4.0, others=5.0, slowed_share=1.0, halved=halved) == 0.0
