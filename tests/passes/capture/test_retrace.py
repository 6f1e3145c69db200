"""Captures with stand-ins: which numbers and tensors of a forward may change in its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoparallel.passes.capture.retrace import (
    LiveProgram,
    capture_live,
    is_same_but_numbers,
    with_values,
)
from autoparallel.passes.programs.interpret import LITERAL
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.call_trace import CallTrace, traced_if_wanted, tracing_calls
from autoparallel.planner.graph.graph import Blocks, Graph, Node, Ref, TensorSpec

X = torch.arange(4.0)


class Forward:
    """A forward whose calls are traced, and its graph: an op for each number, literals."""

    def __init__(self, run: Callable[[], tuple[list[float], list[Tensor]]]) -> None:
        self._run = run

    def __call__(self) -> Program:
        with traced_if_wanted():
            numbers, tensors = self._run()
        literals = [
            Node(
                f"held_{at}",
                "constant",
                LITERAL,
                (each.tolist(),),
                {"dtype": each.dtype},
                (TensorSpec(tuple(each.shape), str(each.dtype).removeprefix("torch.")),),
            )
            for at, each in enumerate(tensors)
        ]
        ops = [
            Node(f"mul_{at}", "op", "aten.mul.Tensor", (Ref("x"), value), {}, (X_SPEC,))
            for at, value in enumerate(numbers)
        ]
        filled = Node("filled", "constant", "aten.full.default", ([2], numbers[0]), {}, (X_SPEC,))
        nodes = (Node("x", "input", outputs=(X_SPEC,)), *literals, filled, *ops)
        return Program(
            Graph(nodes, Ref(nodes[-1].name), 4), Blocks(()), torch.nn.Identity(), "float32", {}
        )


X_SPEC = TensorSpec((4,), "float32")


def live(
    forward: Callable[[], tuple[list[float], list[Tensor]]], tensors: tuple[int, ...] = ()
) -> tuple[CallTrace, LiveProgram | None]:
    """Capture a forward with stand-ins in place of all its numbers, and of these tensors."""
    capture = Forward(forward)
    with tracing_calls() as trace:
        capture()
    kept = CallTrace(list(trace.calls), dict(trace.numbers), list(trace.tensors))
    return kept, capture_live(capture, kept, list(kept.numbers), tensors, lambda: None)


def scaled() -> tuple[list[float], list[Tensor]]:
    return [exact(0.3)], []


def exact(number: float) -> float:
    """Multiply a double by a number, which gives the number that was computed with."""
    return float(torch.ones((), dtype=torch.float64) * number)


def test_a_number_that_reaches_the_program_alone_is_live() -> None:
    trace, found = live(scaled)
    assert found is not None
    ((place, stand_in),) = found.stand_ins.items()
    assert stand_in == pytest.approx(trace.numbers[place], rel=1e-6)
    assert found.program.graph["mul_0"].args[1] == stand_in


def test_a_number_that_another_one_follows_from_is_not_live() -> None:
    assert live(lambda: ([exact(0.3), exact(0.3) ** 2], []))[1] is None


def test_a_number_that_decides_about_the_calls_is_not_live() -> None:
    """The stand-in is no longer 0.3, so that the forward calls another function."""
    assert live(lambda: ([float(X.sum() if exact(0.3) == 0.3 else X.mean())], []))[1] is None


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        [[0.5, 2.0], [1.0, 4.0]],
        np.array([True, False, True, True, False, True]),
    ],
)
def test_a_tensor_that_is_there_alone_is_live_and_takes_other_values(values: Any) -> None:
    def forward() -> tuple[list[float], list[Tensor]]:
        return [1.0], [torch.tensor(values), torch.zeros(7)]

    trace, found = live(forward, tensors=(0,))
    assert found is not None
    assert found.tensors == {0: ("held_0",)}
    now = CallTrace(tensors=[np.zeros_like(trace.tensors[0])])
    changed = with_values(found, {}, now).graph
    assert changed["held_0"].args == (now.tensors[0].tolist(),)
    assert is_same_but_numbers(changed, found.program.graph)
    assert (
        with_values(
            found,
            {},
            CallTrace(tensors=[torch.tensor(found.program.graph["held_0"].args[0]).numpy()]),
        )
        is found.program
    )


def test_a_tensor_that_is_there_twice_or_not_at_all_is_not_live() -> None:
    def twice() -> tuple[list[float], list[Tensor]]:
        made = torch.tensor([1.0, 2.0])
        return [1.0], [made, made]

    def elsewhere() -> tuple[list[float], list[Tensor]]:
        return [1.0], [torch.tensor([1.0, 2.0]) + 1]

    for forward in (twice, elsewhere):
        assert live(forward, tensors=(0,))[1] is None


def test_two_empty_tensors_cannot_be_told_apart() -> None:
    """An empty tensor alone is live: nothing of it can change."""

    def forward(count: int) -> tuple[list[float], list[Tensor]]:
        return [1.0], [torch.tensor([]) for _ in range(count)]

    assert live(lambda: forward(1), tensors=(0,))[1] is not None
    assert live(lambda: forward(2), tensors=(0, 1))[1] is None


def test_a_number_of_a_constant_is_replaced() -> None:
    _, found = live(scaled)
    assert found is not None
    (stand_in,) = found.stand_ins.values()
    changed = with_values(found, {stand_in: 0.9}, CallTrace()).graph
    assert changed["filled"].args == ([2], 0.9)
    assert changed["mul_0"].args == (Ref("x"), stand_in)
