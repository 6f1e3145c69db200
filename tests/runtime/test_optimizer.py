"""The user's optimizer on shards: its groups stay, its kernels run by layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.update.optimizer import (
    LayoutGroups,
    build_optimizer,
    build_with,
    published_gradients,
)

LAYOUTS = (Shard(0), Replicate(), Shard(0), Shard(1))


def _steps(options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(4, 6)) for _ in LAYOUTS]
    shards = [
        nn.Parameter(distribute_tensor(p.detach(), mesh, [layout]))
        for p, layout in zip(whole, LAYOUTS, strict=True)
    ]
    kind = torch.optim.SGD if "momentum" in options else torch.optim.AdamW
    plain = kind([{"params": whole[:3]}, {"params": whole[3:], "lr": 0.5}], lr=0.1, **options)
    optimizer = kind([{"params": shards[:3]}, {"params": shards[3:], "lr": 0.5}], lr=0.1, **options)
    LayoutGroups(optimizer)
    seen: list[list[int]] = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append([len(group["params"]) for group in o.param_groups])
    )
    for _ in range(2):
        for p, shard, layout in zip(whole, shards, LAYOUTS, strict=True):
            p.grad = torch.randn(4, 6)
            shard.grad = distribute_tensor(p.grad, mesh, [layout])
        plain.step()
        optimizer.step()
    assert seen == [[2, 1, 1], [2, 1, 1]]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
    for key, value in options.items():
        assert all(group[key] == value for group in optimizer.param_groups)
    assert optimizer.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    for p, shard in zip(whole, shards, strict=True):
        torch.testing.assert_close(shard.full_tensor(), p.detach())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": True, "momentum": 0.9}]
)
def test_groups_of_several_layouts_keep_their_kernels(options: dict[str, Any]) -> None:
    run_processes(2, _steps, options)


def test_what_a_step_writes_into_its_groups_stays() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    optimizer = Counting([nn.Parameter(torch.ones(2))], lr=0.1)
    LayoutGroups(optimizer)
    for _ in range(3):
        optimizer.step()
    assert optimizer.param_groups[0]["count"] == 3


def test_parameters_come_with_names_where_they_are_asked_for() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    names: list[str] = []

    def by_name(named_parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
        pairs = list(named_parameters)
        names.extend(name for name, _ in pairs)
        return torch.optim.SGD([p for _, p in pairs], lr=lr)

    build_with(by_name, model.named_parameters())
    assert names == ["1.weight", "1.bias"]
    listed = build_with(lambda params: torch.optim.SGD(params), model.named_parameters())
    assert len(listed.param_groups[0]["params"]) == 2


def test_a_rank_without_parameters_gets_the_groups_of_the_others() -> None:
    stand_ins = [("w", nn.Parameter(torch.empty(2, device="meta")))]
    optimizer = build_optimizer(
        (), lambda p: torch.optim.AdamW([{"params": p}, {"params": []}]), stand_ins=stand_ins
    )
    assert len(optimizer.param_groups) == 2
    optimizer.step()
    assert published_gradients(()) == []


def _strange() -> str:
    from test_stage import device_mesh_of, make_stage

    from autoparallel.planner.graph.layout import Mesh

    mesh = Mesh(("dp",), (2,))
    stage = make_stage(mesh, [0, 1], zero=0, device_mesh=device_mesh_of(mesh, [0, 1]))
    others = [nn.Parameter(torch.ones(2))]
    try:
        build_optimizer(stage.by_name.values(), lambda p: torch.optim.SGD(copy.copy(others)))
    except UsageError as error:
        return error.code
    return ""


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    assert run_processes(2, _strange) == ["AP904", "AP904"]
