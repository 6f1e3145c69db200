"""The first op that makes a value that is not finite, forward or backward, is named."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from autoparallel.passes.local.localize import MADE_BY
from autoparallel.planner.graph.graph import Node
from autoparallel.runtime.step.diagnosis import Found, OpCheck


def checked(function, *inputs: Tensor) -> OpCheck:
    """After a forward and backward of ``function``, whose ops stand for nodes of their names."""
    graph = fx.symbolic_trace(function)
    for node in graph.graph.nodes:
        if node.op == "call_function":
            made_by = Node(node.name, "op", f"aten.{node.name}", module="net.up", source="net.py:7")
            node.meta[MADE_BY] = made_by
    check = OpCheck(lambda: 3)

    outputs = check.checked(graph)(*inputs)
    outputs[0].sum().backward()
    return check


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, requires_grad=True)


def test_the_op_that_overflows_is_named_and_not_the_one_that_makes_nan_of_it() -> None:
    def overflows(x: Tensor) -> tuple[Tensor]:
        large = torch.exp(x)
        return (torch.sub(large, large),)

    found = checked(overflows, values(1.0, 1000.0)).forward
    assert found == Found("aten.exp (net.up, net.py:7)", 3)


def test_a_mask_of_infinities_is_no_such_op() -> None:
    def masks(x: Tensor, mask: Tensor) -> tuple[Tensor]:
        filled = torch.masked_fill(x, mask, -math.inf)
        return (torch.softmax(filled, 0),)

    found = checked(masks, values(1.0, 2.0), torch.tensor([True, False]))
    assert found.forward is None
    assert found.backward is None


def test_the_op_whose_backward_divides_by_zero_is_named() -> None:
    def divides(x: Tensor) -> tuple[Tensor]:
        doubled = torch.mul(x, 2.0)
        root = torch.sqrt(doubled)
        return (torch.mul(root, 3.0),)

    found = checked(divides, values(0.0, 4.0))
    assert found.forward is None
    assert found.backward == Found("aten.sqrt (net.up, net.py:7)", 3)


def test_an_op_that_stands_for_no_node_is_named_by_its_own_name() -> None:
    graph = fx.symbolic_trace(lambda x: (torch.log(x),))
    check = OpCheck(lambda: 0)
    check.checked(graph)(torch.tensor([0.0]))
    assert check.forward == Found("log", 0)
