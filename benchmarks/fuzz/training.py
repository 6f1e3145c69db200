"""Training a random model by plain PyTorch and by a plan, and comparing the two.

``train_plain`` is written with nothing of autoparallel; ``train_parallel`` runs on every rank. Both
return ``Figures``.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import autoparallel
from autoparallel.passes.programs.program import Program
from autoparallel.planner.dims.batch import meeting, meeting_text
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan as ProductPlan
from benchmarks.fuzz.draw import TARGETS, Model
from benchmarks.fuzz.plans import Plan

NUM_STEPS = 3
LEARNING_RATE = 0.05
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "bfloat16": 0.02}
"""The largest difference that counts as equal, relative to the largest element of a tensor."""

NOISE_FACTOR = 5.0
"""Plans may differ from the plain run by so many times what that differs from float64."""

LEAST_SCALE = 1e-3
"""Differences of smaller tensors, such as gradients that cancel, are relative to this."""

LEAST_WEIGHT = 0.1
"""The same for weights and buffers."""

Batch = dict[str, Tensor]


@dataclass(slots=True)
class Figures:
    """Results of a training run: numbers and tensors by name, in the order they were made."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        self.values[name] = whole(tensor).clone()


def whole(tensor: Any) -> Tensor:
    """Return a tensor of a model, gathered from the ranks if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def refuse_if_rows_are_apart(program: Program, plan: ProductPlan, rank: int) -> None:
    """Raise UsageError AP125 where samples meet and a plan has several micro-batches, which are
    then computed for themselves; the product only says so."""
    node = meeting(program.graph)
    if node and plan.num_microbatches > 1:
        raise UsageError("AP125", meeting_text(node), why="micro-batches", fix="microbatches=1")


def load(source: str) -> dict[str, Any]:
    """Return the names of a module given as text; tracebacks show its lines."""
    name = "<random model>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "random_model"}
    exec(compile(source, name, "exec"), names)
    return names


def make_batches(model: Model, seed: int, dtype: torch.dtype, count: int) -> list[Batch]:
    """Return global batches of all that a model could be given."""
    generator = torch.Generator().manual_seed(seed)
    sizes = model.shapes
    rows, length, classes = sizes["B"], sizes.get("L", 0), sizes["K"]
    places = {"seq": (length,), "vec": (), "img": (sizes.get("S", 0),) * 2}[model.domain]
    if (
        model.domain == "seq"
        and not model.head.startswith("x.")
        and not model.head.startswith("x[")
    ):
        targets: tuple[int, ...] = (rows, length)
    elif model.head == "dense":
        targets = (rows, *places)
    else:
        targets = (rows,)
    found = []
    for _ in range(count):
        batch: Batch = {}
        mask = torch.ones(rows, length, dtype=torch.bool)
        if model.domain == "seq":
            lengths = torch.randint(1, length + 1, (rows,), generator=generator)
            lengths[0] = length
            mask = torch.arange(length)[None] < lengths[:, None]
            batch["mask"] = mask
        if model.inputs == "tokens":
            batch["tokens"] = torch.randint(0, sizes["V"], (rows, length), generator=generator)
        else:
            shape = {"seq": (rows, length, 5), "vec": (rows, 5), "img": (rows, 3, *places)}[
                model.domain
            ]
            batch["numbers"] = torch.randn(shape, generator=generator).to(dtype)
        y = torch.randint(0, classes, targets, generator=generator)
        if len(targets) == 2:
            y = y.masked_fill(~mask, -100)
        elif "ignore_index=1" not in model.loss and len(targets) == 1:
            y[torch.rand(rows, generator=generator) < 0.15] = -100
        elif len(targets) == 3:
            y[
                torch.rand(targets, generator=generator)
                < torch.linspace(0, 0.6, rows)[:, None, None]
            ] = -100
        batch["y"] = y
        batch["t"] = torch.randn(targets, generator=generator).to(dtype)
        batch["count"] = (y >= 0).sum().clamp(min=1)
        batch["share"] = torch.rand(rows, generator=generator).to(dtype)
        found.append(batch)
    return found


def inputs_of(model: Model, batch: Batch) -> Batch:
    """Return what a batch has for the forward of a model."""
    return {name: batch[name] for name in model.arguments}


def loss_of(out: Any) -> Tensor:
    """Return the loss in the outputs of a model that returns it."""
    if isinstance(out, Mapping):
        return out["loss"]
    if isinstance(out, tuple):
        return next(each for each in out if each.dim() == 0)
    return out


def _built(model: Model, seed: int, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    names = load(model.source())
    torch.manual_seed(seed)
    net: nn.Module = names["Net"]().to(dtype).train()
    return net, names.get("criterion")


def _optimizer(name: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    trained = [each for each in parameters if each.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=0.01)
    return torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=0.9)


def _train_by_loop(
    net: nn.Module,
    loss: Callable[[Any, Batch], Tensor],
    model: Model,
    plan: Plan,
    batches: list[Batch],
    figures: Figures,
) -> None:
    """Train by a loop as scripts have it, the same for a plain and a parallel model."""
    optimizer = _optimizer(plan.optimizer, net.parameters())
    given = iter(batches)
    for step in range(NUM_STEPS):
        for part in range(plan.accumulate):
            batch = next(given)
            value = loss(net(**inputs_of(model, batch)), batch) / plan.accumulate
            value.backward()
            figures.add(f"loss {step}.{part}", value)
        if step == 0:
            for name, parameter in net.named_parameters():
                if parameter.grad is not None:
                    figures.add(f"gradient of {name}", parameter.grad)
        if plan.max_norm:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), plan.max_norm)
            figures.add(f"norm {step}", norm)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            _evaluate(net, model, batches, figures)


def _train_plain_steps(
    net: nn.Module,
    loss: Callable[[Any, Batch], Tensor],
    model: Model,
    plan: Plan,
    batches: list[Batch],
    figures: Figures,
) -> None:
    """Train as ``Step`` documents it: means of accumulated gradients, norms before clipping."""
    optimizer = _optimizer(plan.optimizer, net.parameters())
    given = iter(batches)
    for step in range(NUM_STEPS):
        for part in range(plan.accumulate):
            batch = next(given)
            value = loss(net(**inputs_of(model, batch)), batch)
            (value / plan.accumulate).backward()
            figures.add(f"loss {step}.{part}", value)
        gradients = [each.grad for each in net.parameters() if each.grad is not None]
        figures.add(f"norm {step}", torch.nn.utils.get_total_norm(gradients))
        if plan.max_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), plan.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            _evaluate(net, model, batches, figures)


def _train_parallel_steps(
    net: nn.Module, loss_fn: Any, model: Model, plan: Plan, batches: list[Batch], figures: Figures
) -> None:
    step_once = autoparallel.Step(
        net,
        loss_fn=loss_fn,
        build_optimizer=lambda parameters: _optimizer(plan.optimizer, parameters),
        max_norm=plan.max_norm,
        accumulate=plan.accumulate,
        timeout_seconds=40,
    )
    given = iter(batches)
    for step in range(NUM_STEPS):
        for part in range(plan.accumulate):
            batch = next(given)
            inputs = batch_of(model, batch)
            figures.add(f"loss {step}.{part}", step_once(inputs))
        figures.add(f"norm {step}", step_once.gradient_norm)
        if step == 0:
            _evaluate(net, model, batches, figures)


def batch_of(model: Model, batch: Batch) -> Batch:
    """Return the batch that a model is planned and stepped with."""
    if model.returns_loss:
        return inputs_of(model, batch)
    return inputs_of(model, batch) | {name: batch[name] for name in TARGETS}


def _evaluate(net: nn.Module, model: Model, batches: list[Batch], figures: Figures) -> None:
    """Note the outputs for a batch, and for half of it."""
    net.eval()
    batch, rows = batches[-1], model.shapes["B"]
    half = {name: value[: rows // 2] if value.dim() else value for name, value in batch.items()}
    for each in (batch, half):
        with torch.no_grad():
            out = net(**inputs_of(model, each))
        values = (
            out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else [out]
        )
        for value in values:
            number = sum(name.startswith("output") for name in figures.values)
            figures.add(f"output {number} in evaluation", value)
    net.train()


def _states(net: nn.Module, figures: Figures) -> None:
    for name, value in net.state_dict().items():
        figures.add(f"state {name}", value)
    for name, value in net.named_buffers():
        figures.add(f"state {name}", value)


def _loss(model: Model, criterion: Any) -> Callable[[Any, Batch], Tensor]:
    if model.returns_loss:
        return lambda out, batch: loss_of(out)
    needs = (*TARGETS, *(("mask",) if model.domain == "seq" else ()))
    return lambda out, batch: criterion(out, **{name: batch[name] for name in needs})


def train_plain(model: Model, plan: Plan, seed: int, *, is_exact: bool = False) -> Figures:
    """Return the figures of plain PyTorch on one process; ``is_exact``: computed in float64."""
    dtype = getattr(torch, plan.dtype)
    net, criterion = _built(model, seed, dtype)
    batches = make_batches(model, seed, dtype, NUM_STEPS * plan.accumulate + 1)
    if is_exact:
        net = net.double()
        batches = [
            {n: t.double() if t.is_floating_point() else t for n, t in b.items()} for b in batches
        ]
    figures = Figures()
    train = _train_plain_steps if plan.stepped else _train_by_loop
    train(net, _loss(model, criterion), model, plan, batches, figures)
    _states(net, figures)
    _evaluate(net, model, batches, figures)
    return figures


@patch("autoparallel.adoption.join.say_if_rows_are_apart", refuse_if_rows_are_apart)
def train_parallel(model: Model, plan: Plan, seed: int) -> Figures:
    """Return the figures of a plan; every rank of the group calls this."""
    dtype = getattr(torch, plan.dtype)
    net, criterion = _built(model, seed, dtype)
    batches = make_batches(model, seed, dtype, NUM_STEPS * plan.accumulate + 1)
    options: dict[str, Any] = {} if plan.parallel is None else {"parallel": plan.parallel}
    if plan.allow is not None:
        options["allow"] = plan.allow
    loss = _loss(model, criterion)
    example = batch_of(model, batches[0]) if plan.stepped else inputs_of(model, batches[0])
    net = autoparallel.parallelize(net, example_batch=example, **options)
    figures = Figures()
    if plan.stepped:
        loss_fn = None if model.returns_loss else loss
        _train_parallel_steps(net, loss_fn, model, plan, batches, figures)
    else:
        _train_by_loop(net, loss, model, plan, batches, figures)
    with net.unsharded():  # type: ignore[operator]
        _states(net, figures)
    _evaluate(net, model, batches, figures)
    return figures


def is_finite(figures: Figures) -> bool:
    """Whether all numbers of a run are finite and moderate."""
    return all(
        bool(torch.isfinite(each).all()) and (not each.numel() or each.abs().max() < 1e4)
        for each in figures.values.values()
        if each.is_floating_point()
    )


def difference(plain: Figures, parallel: Figures, allowed: Mapping[str, float]) -> str:
    """Return the first figures that differ and by how much, "" if all are equal."""
    wrong: list[str] = []
    for name, value in plain.values.items():
        other = parallel.values.get(name)
        if other is None:
            if not (name.startswith("gradient") and not value.any()):
                wrong.append(f"{name} is missing")
        elif value.shape != other.shape:
            wrong.append(f"{name} has shape {tuple(other.shape)}, not {tuple(value.shape)}")
        elif not (off := relative(value, other, _least_scale(name))) <= allowed[name]:
            wrong.append(f"{name} differs by {off:.1e} of {float(value.abs().max()):.2e}")
    for name, value in parallel.values.items():
        if name not in plain.values and value.any() and not name.startswith("state"):
            wrong.append(f"{name} is not in the plain run")
    return "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def _least_scale(name: str) -> float:
    """Return the size below which a figure is measured against that size.

    A weight whose gradient is rounding alone is moved by an adaptive optimizer all the same.
    """
    return LEAST_WEIGHT if name.startswith("state") else LEAST_SCALE


def relative(value: Tensor, other: Tensor, least: float = LEAST_SCALE) -> float:
    """Return the largest difference of two tensors by the largest element; nan for a nan."""
    if not value.numel():
        return 0.0
    a, b = value.double(), other.double()
    return float((a - b).abs().max()) / max(float(a.abs().max()), least)


def allowances(model: Model, plan: Plan, seed: int, plain: Figures) -> dict[str, float]:
    """Return by how much each figure may differ: the tolerance, or a multiple of its noise.

    The noise of a kind of figures ("gradient", "state") is their largest difference from float64.
    """
    tolerance = TOLERANCE[plan.dtype]
    if plan.dtype == "float64":
        return dict.fromkeys(plain.values, tolerance)
    exact = train_plain(model, plan, seed, is_exact=True)
    noise: dict[str, float] = {}
    for name, value in plain.values.items():
        kind = name.split()[0]
        noise[kind] = max(noise.get(kind, 0.0), relative(exact.values.get(name, value), value))
    return {name: max(tolerance, NOISE_FACTOR * noise[name.split()[0]]) for name in plain.values}
