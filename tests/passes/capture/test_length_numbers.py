"""Numbers that a model makes of the length of its sequences are found: no padding keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from capture_models import program_of
from forced_plans import adopting
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

from autoparallel.passes.programs.length_numbers import find_length_number
from autoparallel.planner.errors import PlanError

ROWS, LENGTH, SHORTER, WIDTH = 4, 12, 9, 8
Scale = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A causal sum over earlier positions, with ``scale`` in front of it."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 16)
        self.place, self.scale = nn.Embedding(32, WIDTH), scale

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.table(tokens) + self.place(torch.arange(tokens.shape[1]))
        h = F.scaled_dot_product_attention(*[self.scale(h)] * 3, is_causal=True)
        return F.cross_entropy(self.out(h).flatten(0, 1), targets.flatten(), ignore_index=-1)


SCALES: dict[str, tuple[Scale, str]] = {
    "nothing": (lambda h: h, ""),
    "a root": (lambda h: h * h.shape[1] ** -0.5, "mul"),
    "an integer": (lambda h: h * h.shape[1], "mul"),
    "a ramp": (lambda h: h * torch.linspace(0, 1, h.shape[1], dtype=h.dtype)[:, None], ""),
    "a branch": (lambda h: h if h.shape[1] > SHORTER else h.tanh(), ""),
}


def _batch(length: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(ROWS, length, dtype=torch.long), torch.zeros(ROWS, length, dtype=torch.long)


@pytest.mark.parametrize("name", SCALES)
def test_a_number_of_the_length_is_found_by_its_op(name: str) -> None:
    scale, op = SCALES[name]
    programs = [program_of(lambda: Net(scale), _batch(each)) for each in (LENGTH, SHORTER)]
    found = find_length_number(*programs)
    assert (found is None) == (name == "nothing")
    assert found is None or op in found.op


def _told(name: str) -> str:
    set_torchrun_variables()
    model: Any = adopting("dp=2")(Net(SCALES[name][0]), _batch(LENGTH), global_batch=ROWS)
    model(*_batch(LENGTH)).backward()
    try:
        model(*_batch(SHORTER)).backward()
    except PlanError as error:
        return f"{error.code} {error.why}"
    return "trained"


def test_a_shorter_batch_of_a_model_that_computes_with_its_length_is_refused() -> None:
    assert run_processes(2, _told, "nothing") == ["trained"] * 2
    for told in run_processes(2, _told, "a root"):
        assert told == "AP560 the model computes with a number that it makes of the length"
