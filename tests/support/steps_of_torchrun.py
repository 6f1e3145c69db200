"""A script under torchrun, or alone: every option of ``Step`` against the plain loop.

``steps_of_torchrun.py PLAN...`` asserts that each plan trains as one device does, and prints
``equal PLAN`` and ``guarded PLAN`` for each.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from forced_plans import settled
from kept_captures import ranks_share_captures
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import autoparallel
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.interpret import run

WIDTH, STEPS, ACCUMULATE, MAX_NORM = 16, 4, 2, 0.5
LARGE = 200.0
"""Its exponential is infinite in float32."""


class Layer(nn.Module):
    def __init__(self, *, is_scaled: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.is_scaled = is_scaled

    def forward(self, x: Tensor, power: Tensor) -> Tensor:
        made = self.down(torch.tanh(self.up(self.norm(x))))
        result: Tensor = x + (made * torch.exp(power) if self.is_scaled else made)
        return result


class Net(nn.Module):
    """Layers between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(is_scaled=at == 2) for at in range(4))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor, power: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = layer(h, power)
        return (self.last(h) - y).square().mean()


def batch(index: int, power: float = 0.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    made = {name: torch.randn(8, WIDTH, generator=generator) for name in ("x", "y")}
    made["power"] = torch.zeros(8, 1)
    made["power"][7] = power
    return made


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
    """No weight decay for biases and norms, as most training scripts have it."""
    named = list(named_parameters)
    decayed = [p for name, p in named if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in named if not (name.endswith("weight") and "norm" not in name)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, fused=True)


def build_scheduler(optimizer: Any) -> LambdaLR:
    """Warm-up of one group, half the rate for the other."""
    return LambdaLR(optimizer, [lambda step: min(1.0, (step + 1) / 4), lambda step: 0.5])


def whole(parameter: Any) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check_weights(model: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter), expected[name].detach(), atol=1e-5, rtol=1e-5)


def check_equal(net: nn.Module, parallelized: Callable[[nn.Module], nn.Module]) -> None:
    """Clipping, warm-up, groups by name, accumulation and a fused optimizer together."""
    plain = copy.deepcopy(net)
    optimizer = build_optimizer(plain.named_parameters())
    scheduler = build_scheduler(optimizer)
    model = parallelized(copy.deepcopy(net))
    step = autoparallel.Step(
        model,
        build_optimizer=build_optimizer,
        build_scheduler=build_scheduler,
        max_norm=MAX_NORM,
        accumulate=ACCUMULATE,
    )
    assert step.gradient_norm is None
    for index in range(STEPS):
        optimizer.zero_grad()
        for part in range(ACCUMULATE):
            loss = plain(**batch(ACCUMULATE * index + part))
            (loss / ACCUMULATE).backward()
            found = step(batch(ACCUMULATE * index + part))
            torch.testing.assert_close(float(found), loss.item(), atol=1e-5, rtol=1e-5)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
        assert float(norm) > MAX_NORM
        torch.testing.assert_close(float(step.gradient_norm), float(norm), atol=0, rtol=1e-6)
        optimizer.step()
        scheduler.step()
        assert step.scheduler.get_last_lr() == scheduler.get_last_lr()
    check_weights(model, plain)
    assert len(step.optimizer.param_groups) == 2
    assert all(group["fused"] for group in step.optimizer.param_groups)


def check_guarded(net: nn.Module, parallelized: Callable[[nn.Module], nn.Module]) -> None:
    """A bad batch changes nothing: decided on the device, on the host, and by a scaler."""
    cases: list[tuple[Any, Any, Any]] = [
        (lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), "skip", None),
        (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "skip", None),
        (
            lambda p: torch.optim.AdamW(p, lr=1e-2),
            "ignore",
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2),
        ),
    ]
    for build, on_nan, scaler in cases:
        plain, model = copy.deepcopy(net), parallelized(copy.deepcopy(net))
        optimizer = build(plain.parameters())
        step = autoparallel.Step(
            model, build_optimizer=build, on_nan=on_nan, scaler=scaler, max_norm=MAX_NORM
        )
        for index in range(6):
            is_bad = index in (0, 3)
            step(batch(index, LARGE if is_bad else 0.0))
            if not is_bad:
                optimizer.zero_grad()
                plain(**batch(index)).backward()
                nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
                optimizer.step()
        assert step.skipped_steps == 2
        check_weights(model, plain)
        # halved by the first batch, doubled after two good ones, and the same again
        assert scaler is None or scaler.get_scale() == 1024.0


def check_half(net: nn.Module, parallel: str) -> None:
    """fp16: the scales, skipped updates and losses of one device with ``torch.amp.GradScaler``."""
    graph = capture(copy.deepcopy(net), batch(0), dtype="float16", autocast=True).graph
    masters = dict(copy.deepcopy(net).named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    expected, scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-15, growth_interval=3)
        for _ in range(2)
    )  # 2**40 and 2**25 overflow by whatever plan, 2**10 by none
    model = autoparallel.parallelize(
        copy.deepcopy(net), example_batch=batch(0), precision="fp16", parallel=settled(parallel)
    )
    step = autoparallel.Step(
        model, build_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), scaler=scaler
    )
    num_skipped = 0
    for index in range(12):
        given = batch(index, LARGE if index == 8 else 0.0)
        halves = {name: each.detach().half().requires_grad_() for name, each in masters.items()}
        inputs = {name: each.half() for name, each in given.items()}
        loss = run(graph, {**halves, **inputs})
        assert loss.dtype == torch.float32
        expected.scale(loss).backward()
        for name, each in masters.items():
            each.grad = halves[name].grad.float()
        before = expected.get_scale()
        expected.step(optimizer)
        expected.update()
        num_skipped += expected.get_scale() < before
        found = step(given)
        assert scaler.get_scale() == expected.get_scale(), index
        assert step.skipped_steps == num_skipped, index
        torch.testing.assert_close(float(found), loss.item(), rtol=2e-2, atol=2e-2, equal_nan=True)
    assert num_skipped > 2
    state = step.state_dict()
    assert state["scaler"] == expected.state_dict()
    assert state["skipped_steps"] == num_skipped
    default = autoparallel.Step(
        autoparallel.parallelize(
            copy.deepcopy(net), example_batch=batch(0), precision="fp16", parallel=settled(parallel)
        )
    )
    default(batch(0))
    assert default.state_dict()["scaler"]["growth_interval"] == 2000


def check_stopped(net: nn.Module, parallelized: Callable[[nn.Module], nn.Module]) -> None:
    """The error names the layer that overflows, and the weights are as before."""
    model = parallelized(copy.deepcopy(net))
    step = autoparallel.Step(
        model, build_optimizer=lambda p: torch.optim.SGD(p, lr=0.0), on_nan="stop"
    )
    step(batch(0))
    with pytest.raises(autoparallel.RunError, match="AP910") as raised:
        step(batch(1, LARGE))
    error = raised.value
    assert "layers.2" in error.what
    is_parallel = isinstance(model, autoparallel.ParallelModule)
    assert ("rank" in error.where and "micro-batch" in error.where) == is_parallel
    assert ("made by aten." in error.what and "steps_of_torchrun.py:" in error.what) == is_parallel
    check_weights(model, net)


def main(plans: list[str]) -> None:
    torch.manual_seed(0)
    net = Net()
    for parallel in plans:

        def parallelized(model: nn.Module, parallel: str = parallel) -> nn.Module:
            return autoparallel.parallelize(
                model, example_batch=batch(0), parallel=settled(parallel)
            )

        with ranks_share_captures(__file__):
            check_equal(net, parallelized)
            sys.stdout.write(f"equal {parallel}\n")
            check_guarded(net, parallelized)
            check_stopped(net, parallelized)
            if "RANK" in os.environ:  # alone, a model keeps its own precision
                check_half(net, parallel)
            sys.stdout.write(f"guarded {parallel}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
