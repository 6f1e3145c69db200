"""Traces of a forward's calls: their contents, and forwards that compute with other values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoparallel.passes.tracing.call_trace import (
    CallTrace,
    replaces_values,
    traced_if_wanted,
    tracing_calls,
)


def traced(
    forward: Callable[[], Any],
    numbers: Mapping[tuple[int, int], float] | None = None,
    tensors: Mapping[int, Any] | None = None,
) -> tuple[CallTrace, Any]:
    """Return the trace of a forward and its result."""
    with tracing_calls(numbers, tensors) as trace:
        assert replaces_values() == bool(numbers or tensors)
        with traced_if_wanted():
            result = forward()
    return trace, result


def test_without_a_wish_nothing_is_traced() -> None:
    assert not replaces_values()
    with traced_if_wanted():
        assert float(torch.tensor(2.0) * 3) == 6.0


@pytest.mark.parametrize(
    ("forward", "numbers", "expected"),
    [
        (lambda x: x * 0.5, {(0, 0): 0.25}, lambda x: x * 0.25),
        (lambda x: torch.clamp(x, min=0.3), {(0, 0): 1.3}, lambda x: x.clamp(min=1.3)),
        (
            lambda x: torch.quantile(x, torch.stack([x[0] * 0.1, x[0] * 0.2])),
            {(2, 0): 0.3},
            lambda x: torch.quantile(x, torch.stack([x[0] * 0.1, x[0] * 0.2])),
        ),
        (
            lambda x: torch.nn.functional.pad(x, (1, 1), value=0.5),
            {(0, 0): 0.75},
            lambda x: torch.nn.functional.pad(x, (1, 1), value=0.75),
        ),
    ],
)
def test_a_forward_computes_with_the_numbers_that_are_asked_for(
    forward: Callable[[Tensor], Tensor],
    numbers: dict[tuple[int, int], float],
    expected: Callable[[Tensor], Tensor],
) -> None:
    x = torch.tensor([1.0, 2.0, 0.25])
    plain, _ = traced(lambda: forward(x))
    trace, result = traced(lambda: forward(x), numbers)
    assert trace.is_like(plain)
    assert torch.equal(result, expected(x))


def test_a_number_in_a_slice_or_a_list_has_its_place_too() -> None:
    """Here of a function that torch does not look into: its arguments are only written down."""

    class Taken(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return args, kwargs

    x = torch.ones(2).as_subclass(Taken)
    change = {(0, 0): 0.25, (0, 2): 7.5}
    _, (args, _) = traced(lambda: x[0.5:4:2.5, [3.5]], change)
    assert args[1] == (slice(0.25, 4, 2.5), [7.5])


def test_calls_differ_where_an_argument_that_is_no_number_does() -> None:
    x = torch.ones(2)
    first, _ = traced(lambda: x[torch.from_numpy(np.array([0, 1]))])
    for other in (lambda: x.sum(0), lambda: x[0:1], lambda: x[0:2]):
        assert not traced(other)[0].is_like(first)
    slices = [traced(lambda stop=stop: x[0:stop])[0] for stop in (1, 2, 2)]
    assert not slices[0].is_like(slices[1])
    assert slices[1].is_like(slices[2])
    rows = [traced(lambda at=at: x[np.array(at)])[0] for at in ([0, 1], [1, 0], [1, 0])]
    assert not rows[0].is_like(rows[1])
    assert rows[1].is_like(rows[2])


def test_a_tensor_that_the_code_holds_is_told_apart_by_its_values() -> None:
    x = torch.arange(3.0)

    def forward(mask: Tensor) -> Tensor:
        return x[:2] * mask

    (one, _), (other, _) = (
        traced(lambda mask=mask: forward(mask)) for mask in (torch.ones(2), torch.zeros(2))
    )
    assert one.is_like(other)
    assert [each.tolist() for each in other.tensors] == [[0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 0.0]]
    assert one.changed_tensors(other) == {2}
    assert not one.changed_numbers(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_held_tensor_is_replaced_in_its_own_dtype(dtype: torch.dtype) -> None:
    held = torch.tensor([1, 2]).to(dtype)
    trace, result = traced(lambda: held + 1, tensors={0: np.array([5.0, 6.0], np.float32)})
    assert result.dtype == dtype
    assert result.tolist() == [6, 7]
    assert trace.tensors[0].tolist() == [1, 2]


def test_a_sparse_tensor_or_one_without_values_is_not_held() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        trace, result = traced(lambda tensor=tensor: tensor.dim())
        assert (result, trace.tensors) == (tensor.dim(), [])


@pytest.mark.parametrize("data", [[1.0, 2.0], np.array([1.0, 2.0])])
def test_a_tensor_that_is_made_of_numbers_is_made_of_others(data: Any) -> None:
    other = {0: np.array([3.0, 4.0])}
    for make in (lambda: torch.tensor(data), lambda: torch.as_tensor(data=data)):
        _, result = traced(lambda make=make: make() * 2, tensors=other)
        assert result.tolist() == [6.0, 8.0]
