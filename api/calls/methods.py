"""Methods besides ``forward`` of a model that trains by a plan.

In: the names given as ``parallelize(methods=…)``. Out: methods that run the model's own code with
whole weights. Without gradients the weights are gathered as in evaluation. With gradients every
rank computes the whole method, because it has no plan.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoparallel.options.parse import did_you_mean
from autoparallel.planner.errors import UsageError
from autoparallel.runtime.parameters.global_values import whole

if TYPE_CHECKING:
    from autoparallel.adoption.state import ParallelState


def has_forward(kind: type[nn.Module]) -> bool:
    """Return whether a module class defines a forward."""
    return kind.forward is not nn.Module.forward


def check_methods(kind: type[nn.Module], names: Sequence[str]) -> None:
    """Raise UsageError AP948 for a name in ``names`` that is no method of the class."""
    if isinstance(names, str):
        raise UsageError(
            "AP948",
            f"methods={names!r} is a text",
            fix=f"give a list of names: methods=[{names!r}]",
        )
    for name in names:
        if not callable(getattr(kind, name, None)) or hasattr(nn.Module, name):
            known = [each for each in vars(kind) if callable(vars(kind)[each]) and each[0] != "_"]
            own = [each for each in known if not hasattr(nn.Module, each)]
            raise UsageError(
                "AP948",
                f"{kind.__name__} has no method {name!r} beside forward",
                fix=did_you_mean(name, own) or f"its methods are {', '.join(own) or 'none'}",
            )


def whole_method(name: str, adopted_of: Callable[[nn.Module], ParallelState]) -> Callable[..., Any]:
    """Return a method that calls the model's own method ``name`` with whole weights, gathered from
    the ranks. ``adopted_of`` returns the state of a parallel model."""
    told: set[int] = set()

    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        adopted = adopted_of(self)
        inherited = getattr(super(type(self), self), name)
        if adopted.computes_plainly:
            return inherited(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, whole, (args, kwargs))
        own = functools.partial(inherited, *args, **kwargs)
        self._join_once()  # type: ignore[operator]
        if not torch.is_grad_enabled() or not self.training:
            return adopted.run_whole(own)
        if id(adopted) not in told and adopted.joined.model.rank == 0:
            sys.stderr.write(
                f"autoparallel: {type(self).__name__}.{name} is computed whole on every rank; "
                "the plan is for forward\n"
            )
        told.add(id(adopted))
        with adopted.trained_whole():
            return own()

    return method
