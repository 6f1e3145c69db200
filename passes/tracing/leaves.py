"""Choice of submodules as opaque leaves: the smallest that cannot be exported.

In: a model, the leaves so far, and the error of an export. Out: the leaves with the failing
submodule, and all others of its class, added.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .locate import failing_module

LARGEST_SHARE = 0.5
"""Largest share of the model's parameters in one opaque leaf, which every rank computes whole."""


class LeafError(Exception):
    """Error of an export that fails although no further submodule can be exported as a single
    op."""


def widen(
    model: nn.Module, leaves: Mapping[str, nn.Module], error: BaseException
) -> dict[str, nn.Module]:
    """Add the submodule that raised ``error`` to ``leaves``, the submodules exported as single ops;
    if it is there already, add its parent. Raises LeafError if that is the model itself, or has
    most of its parameters."""
    path = failing_module(error, model)
    while path and any(path == leaf or path.startswith(f"{leaf}.") for leaf in leaves):
        path = path.rpartition(".")[0]
    if not path:
        raise LeafError
    kind = type(model.get_submodule(path))
    alike = {name: m for name, m in model.named_modules() if type(m) is kind and name}
    wider = {**leaves, **alike}
    found = {
        name: module
        for name, module in wider.items()
        if not any(name.startswith(f"{other}.") for other in wider)
    }
    if max(map(_count, alike.values())) > LARGEST_SHARE * max(_count(model), 1):
        raise LeafError
    return found


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
