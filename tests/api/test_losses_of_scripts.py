"""A script computes the loss of the outputs of a model of experts: under a plan as alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from forced_plans import adopting
from marks import slow
from processes import run_processes, set_torchrun_variables
from torch import Tensor, nn

from autoparallel.target.load import load_target

STEPS, ROWS, RANKS = 2, 8, 4


def model() -> nn.Module:
    torch.manual_seed(0)
    made = load_target("hf:tests/models/mixtral", {}).build_model().double()
    made.config._experts_implementation = "eager"
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def batches() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 64, (STEPS, ROWS, 16), generator=generator)


def train(own: nn.Module, rows: slice) -> list[float]:
    """Train on ``rows`` of each batch; return the sum of squares of the logits of each step."""
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    found = []
    for batch in batches():
        tokens = batch[rows]
        logits = own(input_ids=tokens).logits
        assert logits.shape[0] == len(tokens)
        found.append(float(logits.detach().square().sum()))
        optimizer.zero_grad()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return found


@cache
def alone() -> list[float]:
    return train(model(), slice(ROWS))


def _planned(parallel: str, num_shares: int) -> list[float]:
    set_torchrun_variables()
    example = {"input_ids": batches()[0]}
    own = adopting(parallel)(model(), example, loss=None)
    size = ROWS // num_shares
    place = dist.get_rank() * num_shares // RANKS
    return train(own, slice(place * size, place * size + size))


@pytest.mark.parametrize(
    ("parallel", "num_shares"),
    [
        ("dp=4,ep=2", 4),
        ("dp=4,ep=4,zero=2", 4),
        slow("dp=4", 4),
        slow("dp=4,ep=4", 1),
        slow("dp=2,tp=2,ep=4", 1),
    ],
)
def test_ranks_get_the_outputs_of_the_rows_that_they_gave(parallel: str, num_shares: int) -> None:
    """Ranks give their shares of each batch, or all give the whole batch. The first step is also
    compared with one device."""
    results = run_processes(RANKS, _planned, parallel, num_shares)
    found = torch.tensor(results, dtype=torch.float64)
    total = found.sum(0) * num_shares / RANKS
    assert total.tolist() == pytest.approx(alone(), rel=1e-6)
