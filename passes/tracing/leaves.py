"""Which submodules become opaque leaves: the smallest that an export cannot look into.

In: a model, the leaves so far, and what an export ended with. Out: the leaves with the
failing submodule, and all others of its class, added.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .locate import failing_module

LARGEST_SHARE = 0.5
"""A leaf runs whole on every rank: beyond this share of the parameters there is no plan."""


class LeafError(Exception):
    """No further submodule can be a leaf."""


def widen(
    model: nn.Module, leaves: Mapping[str, nn.Module], error: BaseException
) -> dict[str, nn.Module]:
    """``leaves`` and the submodule that ``error`` comes from, or where that one is a leaf
    already, the one around it.

    Raises LeafError where that is the model itself, or most of it.
    """
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
