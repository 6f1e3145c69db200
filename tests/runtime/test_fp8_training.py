"""Training in fp8, emulated on CPUs: held to the model as torchao converts it, and to bf16."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from marks import slow
from one_stage import plan
from processes import RankError, run_processes
from torch import Tensor, nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.parse import parse_parallel
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Precision
from autoparallel.planner.requests.request import Request
from autoparallel.runtime.launch import membership
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.first_step import check_first_step
from autoparallel.runtime.verify.verify import collect

ROWS, WIDTH, LAYERS, STEPS = 64, 32, 4, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shrunk: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + shrunk


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).float(), y)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn((ROWS, WIDTH), generator=generator),
        "y": torch.randint(16, (ROWS,), generator=generator),
    }


@cache
def program() -> Program:
    model = net().to("meta")
    parts = {name: part.to("meta") for name, part in batch().items()}
    return capture(model, parts, dtype="bfloat16")


def trained(
    parallel: str, precision: Precision, compiled: bool = False, emulates: bool = True
) -> tuple[list[float], dict[str, Any]]:
    """The losses of some steps by a plan, and on rank 0 the gradients of the first.

    ``emulates``: CPUs are taken for devices with units for 8-bit products.
    """
    if emulates:
        membership._check_eight_bits = lambda device: None
    trainer, inputs = trainer_of(parallel, precision, compiled)
    losses: list[float] = []
    gradients: dict[str, Any] = {}
    for step in range(STEPS):
        losses.append(float(trainer.step(inputs).loss))
        if step == 0:
            pieces = collect(
                trainer.model.all_parameters(), trainer.program.graph, lambda each: each.gradient
            )
            gradients = {
                name: [(region, part.numpy()) for region, part in held]
                for name, held in pieces.items()
            }
    return losses, gradients


def trainer_of(
    parallel: str, precision: Precision, compiled: bool = False
) -> tuple[Trainer, dict[str, Tensor]]:
    forced = parse_parallel(parallel)
    request = Request(ROWS, forced=forced, precision="bf16")
    count = (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)
    found = plan(program().graph, program().blocks, parse_cluster(f"cpu:{count}"), request)
    model = replace(found.model, precision=precision)
    found = replace(found, model=model, compiled=compiled)
    weights = {name: each.detach() for name, each in net().named_parameters()}
    trainer = Trainer(
        program(),
        found,
        weights,
        device=torch.device("cpu"),
        build=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    values = batch()
    inputs = {name: place.read(values) for name, place in program().inputs.items()}
    return trainer, inputs


def converted(training: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients of the model that torchao converts."""
    model, parts = net().to(torch.bfloat16), batch()
    training.convert_to_float8_training(
        model,
        config=training.Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: name != "head",
    )
    loss = model(parts["x"].to(torch.bfloat16), parts["y"])
    loss.backward()
    return float(loss.detach()), {n: p.grad.float().numpy() for n, p in model.named_parameters()}


def test_one_device_computes_what_torchaos_model_does() -> None:
    training = pytest.importorskip("torchao.float8")
    losses, gradients = run_processes(1, trained, "dp=1,microbatches=1", "fp8")[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have; sums of several are not the same bits
    try:
        loss, expected = converted(training)
    finally:
        torch.set_num_threads(threads)
    assert losses[0] == loss
    assert gradients.keys() == expected.keys()
    for name, ((_, found),) in gradients.items():
        assert np.array_equal(found, expected[name]), name


@cache
def losses_of(
    parallel: str, precision: Precision, num_ranks: int, compiled: bool = False
) -> list[float]:
    found = run_processes(num_ranks, trained, parallel, precision, compiled, timeout_seconds=100)
    losses: list[float] = found[0][0]
    return losses


PLANS = (
    slow("dp=2,zero=0,microbatches=1"),
    slow("dp=2,zero=3,microbatches=2,recompute=selective"),
    slow("tp=2,microbatches=1,recompute=full"),
    "pp=2,microbatches=4,schedule=zb-h1",
)


@pytest.mark.parametrize("parallel", PLANS)
def test_plans_train_in_fp8_nearly_as_in_bf16(parallel: str) -> None:
    pytest.importorskip("torchao.float8")
    losses = losses_of(parallel, "fp8", 2)
    bf16 = losses_of("dp=1,microbatches=1", "bf16", 1)
    assert losses != bf16
    assert losses == pytest.approx(bf16, rel=0.02)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_compiled_blocks_cast_in_their_runs() -> None:
    pytest.importorskip("torchao.float8")
    losses = losses_of("dp=1,microbatches=1", "fp8", 1, True)
    eager = losses_of("dp=1,microbatches=1", "fp8", 1)
    assert losses == pytest.approx(eager, rel=0.02)
    assert losses != eager


def compared(parallel: str) -> list[str]:
    """The comparison of a first step with that of the model, and of a model with twice its loss."""
    membership._check_eight_bits = lambda device: None
    trainer, inputs = trainer_of(parallel, "fp8")

    def plain(weights: Any, given: Any, factor: float) -> Tensor:
        cast = {name: value.to(torch.bfloat16) for name, value in weights.items()}
        args = (given["x"].to(torch.bfloat16), given["y"])
        loss: Tensor = torch.func.functional_call(net(), cast, args) * factor
        return loss

    def own() -> Tensor:
        return trainer.runner.backward(inputs)

    found = [check_first_step(trainer, inputs, own, partial(plain, factor=1.0), dict)]
    with pytest.raises(UsageError, match=r"of the model alone: .* gradients differ") as error:
        check_first_step(trainer, inputs, own, partial(plain, factor=2.0), dict)
    return [*found, error.value.code]


@pytest.mark.parametrize("parallel", ["dp=1", slow("dp=2,zero=3"), slow("pp=2,microbatches=4")])
def test_the_first_step_is_compared_with_that_in_bf16(parallel: str) -> None:
    pytest.importorskip("torchao.float8")
    for result in run_processes(2 if "2" in parallel else 1, compared, parallel):
        assert result == ["", "AP943"]


def test_a_cpu_does_not_train_in_fp8() -> None:
    with pytest.raises(RankError, match=r"AP413.*type cpu does not compute in fp8"):
        run_processes(1, trained, "dp=1,microbatches=1", "fp8", False, False)
