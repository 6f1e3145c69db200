"""Optimizers of parameters that are no longer trained.

A model's parameters are replaced by this rank's shards when it is planned. An optimizer that was
made before holds the old ones, which get no gradients: its steps would change nothing, without a
word. Old parameters are therefore emptied and marked, and a step of an optimizer that holds
one raises.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autoparallel.planner.errors import UsageError

_MARK = "_autoparallel_replaced"


def retire(parameter: nn.Parameter, name: str) -> None:
    """Empty a parameter that a shard has replaced, and have its optimizer's steps raise."""
    _watch_steps()
    parameter.__dict__[_MARK] = name
    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    parameter.grad = None


def is_retired(parameter: nn.Parameter) -> bool:
    """Whether a shard has replaced a parameter already."""
    return _MARK in parameter.__dict__


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = getattr(parameter, _MARK, None)
            if name is not None:
                raise UsageError(
                    "AP925",
                    f"the optimizer holds {name} from before the model was planned",
                    why="training updates its shards instead, so this step would change nothing",
                    fix="create the optimizer after parallelize, from model.parameters() or, for "
                    "parts of the model, after model.join()",
                )
