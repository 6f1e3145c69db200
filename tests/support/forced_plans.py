"""Texts of ``parallel`` that leave a search nothing to decide but how tensors are split."""

from __future__ import annotations

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
