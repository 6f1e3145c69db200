"""Where a batch in which rows see each other does not fit, micro-batches are the way out."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.planner.errors import InfeasibleError
from autoparallel.planner.plan import Plan
from autoparallel.planning import objectives as goals

BATCH = 8
LIMIT = "1200MB"


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            )
        )

    def forward(self, image: Tensor) -> Tensor:
        loss: Tensor = self.layers(image).square().mean()
        return loss


def planned(limit: str, parallel: str | None = None) -> Plan:
    return autoparallel.plan(
        Normed(),
        {"image": torch.empty(BATCH, 8, 1024, 512, device="meta")},
        cluster="1xA100",
        memory_limit=limit,
        parallel=parallel,
    )


@pytest.mark.slow
def test_the_fewest_micro_batches_that_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named number fits, half of it does not; the module that mixes rows is named."""
    with pytest.raises(InfeasibleError) as caught:
        planned(LIMIT)
    named = re.search(r"microbatches=(\d+), each of which (\S+) \((.+?)\) then", caught.value.fix)
    assert named is not None, caught.value.fix
    count = int(named[1])
    assert (named[2], named[3]) == ("layers.1", "batch norm")
    assert planned(LIMIT, f"microbatches={count}").num_microbatches == count
    assert count > 2
    # that half as many do not fit is asked, and not what would fit then
    monkeypatch.setattr(goals, "with_nearest_change", lambda error, *_, **options: error)
    with pytest.raises(InfeasibleError):
        planned(LIMIT, f"microbatches={count // 2}")
