"""Texts of ``parallel`` that leave a search nothing to decide but how tensors are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import autoparallel

Adopt = Callable[..., Any]
"""Makes a model parallel, given its example batch; of a plain run, gives the model itself."""

USUAL = {"zero": "0", "recompute": "none", "microbatches": "1"}
PIPELINED = {**USUAL, "microbatches": "2", "schedule": "1f1b"}


def settled(parallel: str) -> str:
    """``parallel`` with all else that it does not say.

    >>> settled("dp=2,zero=3")
    'dp=2,zero=3,recompute=none,microbatches=1'
    """
    given = dict(part.split("=") for part in parallel.split(","))
    usual = PIPELINED if int(given.get("pp", "1")) > 1 else USUAL
    return ",".join(f"{name}={value}" for name, value in {**given, **usual, **given}.items())


def adopting(plan: str) -> Adopt:
    """Return a function that has a model train by ``plan``, for global batches of 8."""

    def adopt(model: nn.Module, example: Any, **options: Any) -> nn.Module:
        given = {"global_batch": 8, "parallel": settled(plan), "profile": "analytic"}
        return autoparallel.parallelize(model, example_batch=example, **{**given, **options})

    return adopt
