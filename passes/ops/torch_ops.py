"""Ops by their path: ``"aten.linear.default"`` to the callable, and facts of its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload


@cache
def resolve(path: str) -> OpOverload:
    """Return the op of ``torch.ops`` at ``path``.

    >>> resolve("aten.linear.default") is torch.ops.aten.linear.default
    True
    """
    namespace, name, overload = path.split(".")
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(op, OpOverload)
    return op


def path_of(op: OpOverload) -> str:
    """Return the path of an op in ``torch.ops``; the inverse of ``resolve``."""
    return str(op)


@cache
def mutated_argument(path: str) -> str | None:
    """Return the name of the argument that the op at ``path`` writes to; None if there is none."""
    for argument in resolve(path)._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            return str(argument.name)
    return None


@cache
def is_view(path: str) -> bool:
    """Return whether an output of the op may share memory with an input without writing to it."""
    schema = resolve(path)._schema
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )


@cache
def has_argument(path: str, name: str) -> bool:
    """Return whether the op's schema has an argument of that name."""
    return any(argument.name == name for argument in resolve(path)._schema.arguments)


@cache
def is_random(path: str) -> bool:
    """Return whether the op draws random numbers: torch's, counter-based, or any dropout."""
    op = resolve(path)
    return torch.Tag.nondeterministic_seeded in op.tags or "dropout" in path or "counter_" in path


def draws_by_itself(path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws from one of torch's random generators, not counter-based numbers.
    Dropout at a rate of 0 or outside of training draws nothing."""
    schema = resolve(path)._schema
    has_generator = any(str(each.type) == "Optional[Generator]" for each in schema.arguments)
    if "counter_" in path or not (is_random(path) or has_generator):
        return False
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | dict(kwargs)
    defaults = {each.name: each.default_value for each in schema.arguments} | given
    rates = [defaults[name] for name in ("p", "dropout", "dropout_p") if name in defaults]
    is_training = all(defaults.get(name, True) for name in ("train", "training"))
    is_dropout = "dropout" in path or "dropout" in defaults or "dropout_p" in defaults
    return is_training and not (is_dropout and not any(rates))


@cache
def is_pointwise(path: str) -> bool:
    """Return whether the op computes each output element from the input elements at its position
    (after broadcasting) alone."""
    op = resolve(path)
    return torch.Tag.pointwise in op.tags or path.startswith("aten.masked_fill.")


def forget() -> None:
    """Clear the caches of op properties in this module, after a user has registered an op again."""
    for cached in (resolve, mutated_argument, is_view, has_argument, is_random, is_pointwise):
        cached.cache_clear()


def returns_several(path: str) -> bool:
    """Return whether an op returns a tuple or list, even of a single tensor."""
    returns = resolve(path)._schema.returns
    return len(returns) > 1 or str(returns[0].type).startswith("List")
