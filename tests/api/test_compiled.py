"""The option to compile blocks: in plans, their files and reports, and in runs that override it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.planner.plan import Plan
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.report.page import describe
from autoparallel.training.run_setup import with_compile_choice


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.up(x).sigmoid().square().exp()
        shrunk: Tensor = self.down(grown)
        return shrunk.tanh().square().mean()


def planned(*, compiled: bool) -> Plan:
    batch = {"x": torch.empty((8192, 256), device="meta")}
    return autoparallel.plan(Net(), batch, cluster="1xH100", profile="analytic", compile=compiled)


def test_a_compiled_plan_is_faster_says_so_and_survives_its_file() -> None:
    eager, compiled = planned(compiled=False), planned(compiled=True)
    assert compiled.prediction.step_seconds < eager.prediction.step_seconds
    assert compiled.prediction.peak_memory_bytes < eager.prediction.peak_memory_bytes
    assert ", compiled, " in describe(compiled).splitlines()[1]
    assert ", eager, " in describe(eager).splitlines()[1]
    assert loads(dumps(compiled)).compiled


def test_a_run_that_differs_from_its_plan_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(compiled=True)
    assert with_compile_choice(plan, None, rank=0) is plan
    assert with_compile_choice(plan, True, rank=0) is plan
    assert capsys.readouterr().err == ""
    assert not with_compile_choice(plan, False, rank=0).compiled
    assert "priced for compiled blocks and runs eager" in capsys.readouterr().err
    with_compile_choice(plan, False, rank=1)
    assert capsys.readouterr().err == ""
