"""The modes and random numbers that a model is planned with, whatever is around its first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoparallel.passes.capture.python_state import Generators


@contextmanager
def as_at_start() -> Iterator[None]:
    """Planning neither depends on the modes around a model's first use nor draws random numbers.

    All ranks go on with the random numbers that they had: a script that draws its batches draws
    the same ones on every rank, and those that it draws alone.
    """
    generators = Generators.now()
    try:
        with in_modes_of_training():
            yield
    finally:
        generators.restore()


@contextmanager
def in_modes_of_training() -> Iterator[None]:
    """Compute gradients without autocast, whatever is around; torch draws nothing for good."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        torch.random.fork_rng(),
    ):
        yield
