"""Memory traffic of a layer of experts beside its products: rows, activations, biases, scores.

In: a layer of experts at local shapes, and its division into kernels. Out: bytes in forward and
backward. For each (token, expert) pair, a row as wide as the token is copied to the expert and the
result is copied back (Gale et al. 2022, MegaBlocks, section 5.2). The activation, perhaps after a
bias, is between the two products; the score, perhaps after a bias, follows the second.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from ..graph.expert_dims import FIRST_WEIGHT
from ..graph.graph import Node, TensorSpec
from .case import argument
from .saved import expert_pairs
from .work import family_named

ExpertKernels = Literal["separate", "activation", "one"]
"""Division into kernels. ``separate``: every elementwise op is a kernel, as in eager code and in
Megatron-LM if experts have biases. ``activation``: all ops between the products are one kernel.
``one``: they are part of the products' kernels, as in cuDNN's grouped products with an
activation."""


def expert_traffic(
    node: Node, inputs: Sequence[TensorSpec], kernels: ExpertKernels, moves: int
) -> tuple[int, int]:
    """Return the bytes of memory traffic around the experts' products (forward, backward).

    A row is copied ``moves`` times, on the way to its expert and back; so is its gradient.
    """
    tokens, first, second = inputs[0], inputs[FIRST_WEIGHT], inputs[FIRST_WEIGHT + 1]
    width = tokens.shape[-1]
    made, read = (weight.numel // weight.shape[0] // width for weight in (first, second))
    forward = backward = 2 * moves * width
    if kernels == "activation":
        forward, backward = forward + made + read, backward + 2 * made + read
    elif kernels == "separate":
        has_biases = len(node.inputs) > FIRST_WEIGHT + 2
        text = argument(node, 7, "activation", "[]")
        within = _activation(json.loads(text), made, read)
        biases = (made + width) if has_biases else 0
        # A bias is gathered by row and added; its gradient is summed. The scores are multiplied in.
        forward += within[0] + 4 * biases + 2 * width
        backward += within[1] + 2 * biases + 4 * width
    pairs = expert_pairs(node, inputs) * tokens.itemsize
    return pairs * forward, pairs * backward


def _activation(calls: Sequence[Any], made: int, read: int) -> tuple[int, int]:
    """Return the elements per row that the ops of the activation read and write (forward,
    backward).

    In the forward each op reads its operands and writes its result; in the backward it reads the
    result's gradient and its operands, and writes their gradients. ``made`` is the width of the
    first product's result, ``read`` the width of the second product's operand and of views.
    """
    widths, forward, backward = [made], 0, 0
    for target, arguments, options in calls:
        given = (*arguments, *options.values())
        places = [each["at"] for each in given if isinstance(each, dict) and "at" in each]
        name = target.rpartition(".")[2]
        is_view = name in ("getitem", "contiguous") or family_named(name) == "view"
        width = read if is_view else max((widths[at] for at in places), default=read)
        widths.append(width)
        if not is_view:
            forward += (len(places) + 1) * width
            backward += (2 * len(places) + 1) * width
    return forward, backward
