"""A small model in blocks, and stage programs for it written by hand.

The model: ``h = scale * first(x)``, two residual MLPs with a gain, and a head whose loss is a
mean square. ``scale`` is used in the first and in the last block. ``WEIGHTS`` names every
parameter with its shape; the head's odd rows make uneven ZeRO shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoparallel.passes.local.stage_cut import Boundary
from autoparallel.passes.local.stage_program import (
    BlockProgram,
    HeldValue,
    ParameterProgram,
    StageProgram,
)
from autoparallel.passes.ops.collectives import (
    Communicator,
    Rank,
    apply_steps,
    local_tensor,
)
from autoparallel.planner.graph.graph import TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, REPLICATE, Layout, Mesh, shard
from autoparallel.planner.plan import StagePlan, StagePrediction
from autoparallel.runtime.messages.groups import stage_mesh
from autoparallel.runtime.step.executor import ReadConstants

aten = torch.ops.aten


def summed(part: Tensor | None) -> Tensor:
    """A loss, from the parts that ranks have of it."""
    loss = torch.zeros((), dtype=torch.float64) if part is None else part.double()
    dist.all_reduce(loss)
    return loss


def whole(tensor: Any) -> Tensor:
    """A parameter or gradient of a stage, gathered where the stage splits it."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered


def given_constants(values: Mapping[str, Tensor]) -> ReadConstants:
    """What an executor reads, where the constants are the same for all that it runs."""
    return lambda variant, program: (values, values)


WEIGHTS: dict[str, tuple[int, ...]] = {
    "scale": (6,),
    "first.weight": (6, 5),
    **{
        f"layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in {
            "gain": (6,),
            "up.weight": (10, 6),
            "up.bias": (10,),
            "down.weight": (6, 10),
            "down.bias": (6,),
        }.items()
    },
    "head.weight": (3, 6),
    "temperature": (),
}

MICROBATCH = 4


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The initial value of every parameter."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5
        for name, shape in WEIGHTS.items()
    }


def global_batch(num_microbatches: int, step: int = 0) -> dict[str, Tensor]:
    """The same batch on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = MICROBATCH * num_microbatches
    return {
        "x": torch.randn((rows, 5), generator=generator, dtype=torch.float64),
        "y": torch.randn((rows, 3), generator=generator, dtype=torch.float64),
    }


def model_loss(w: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """The loss on one device."""
    h = (batch["x"] @ w["first.weight"].T) * w["scale"]
    for i in range(2):
        u = h * w[f"layers.{i}.gain"]
        u = torch.tanh(u @ w[f"layers.{i}.up.weight"].T + w[f"layers.{i}.up.bias"])
        h = h + u @ w[f"layers.{i}.down.weight"].T + w[f"layers.{i}.down.bias"]
    logits = (h * w["scale"]) @ w["head.weight"].T * w["temperature"]
    return ((logits - batch["y"]) ** 2).mean()


@dataclass(frozen=True)
class Reference:
    """What one process gets: per step the loss, gradients and the weights after the step."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    weights: list[dict[str, Tensor]]


def reference(num_steps: int, num_microbatches: int, learning_rate: float) -> Reference:
    """AdamW on one process."""
    w = {name: nn.Parameter(value) for name, value in weights().items()}
    optimizer = torch.optim.AdamW(w.values(), lr=learning_rate)
    result = Reference([], [], [])
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model_loss(w, global_batch(num_microbatches, step))
        loss.backward()
        result.losses.append(loss.detach())
        result.gradients.append({n: p.grad.clone() for n, p in w.items() if p.grad is not None})
        optimizer.step()
        result.weights.append({n: p.detach().clone() for n, p in w.items()})
    return result


@dataclass(frozen=True)
class Builder:
    """Writes a block's graph for one rank, as the pass that localizes graphs does."""

    graph: fx.Graph
    root: nn.Module
    rank: Rank
    layouts: Mapping[str, Layout]

    def input(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def op(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)

    def parameter(self, name: str, use: str = "") -> fx.Node:
        """A parameter's local tensor, whole on ``dp``; ``use="I"`` where tp ranks do the same."""
        holder = self.root
        *path, attribute = name.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(attribute, nn.Parameter(torch.empty(0, device="meta")))
        node = self.op(local_tensor, self.graph.get_attr(name))
        for axis, held in zip(self.rank.mesh.axes, self.layouts.get(name, ()), strict=False):
            if axis == "dp" and held.is_shard:
                node = self.on_dp(node, f"{held} -> R")
        return self.on_tp(node, "R -> I") if use == "I" else node

    def on_tp(self, node: fx.Node, change: str) -> fx.Node:
        if "tp" not in self.rank.mesh.axes:
            return node
        return self.op(self.rank.bound(apply_steps), node, f"tp: {change}")

    def on_dp(self, node: fx.Node, change: str) -> fx.Node:
        if "dp" not in self.rank.mesh.axes:
            return node
        return self.op(self.rank.bound(apply_steps), node, f"dp: {change}")


def _first(b: Builder) -> tuple[fx.Node, ...]:
    x, scale = b.input("x"), b.input("scale")
    h = b.op(aten.linear.default, x, b.parameter("first.weight", "I"))
    return (b.op(aten.mul.Tensor, h, b.on_tp(scale, "R -> I")),)


def _layer(b: Builder, index: int) -> tuple[fx.Node, ...]:
    h = b.input("h")
    name = f"layers.{index}."
    u = b.op(aten.mul.Tensor, h, b.parameter(name + "gain", "I"))
    u = b.on_tp(u, "I -> R")
    u = b.op(aten.linear.default, u, b.parameter(name + "up.weight"), b.parameter(name + "up.bias"))
    u = b.op(aten.tanh.default, u)
    d = b.op(aten.linear.default, u, b.parameter(name + "down.weight"))
    d = b.on_tp(d, "P -> I")
    d = b.op(aten.add.Tensor, d, b.parameter(name + "down.bias", "I"))
    return (b.op(aten.add.Tensor, h, d),)


def _last(b: Builder) -> tuple[fx.Node, ...]:
    h, scale, y = b.input("h"), b.input("scale"), b.input("y")
    h = b.op(aten.mul.Tensor, h, b.on_tp(scale, "R -> I"))
    logits = b.op(aten.linear.default, h, b.parameter("head.weight", "I"))
    logits = b.op(aten.mul.Tensor, logits, b.parameter("temperature", "I"))
    square = b.op(aten.pow.Tensor_Scalar, b.op(aten.sub.Tensor, logits, y), 2)
    total = b.op(aten.div.Tensor, b.op(aten.sum.default, square), MICROBATCH * 3)
    return (b.on_dp(total, "P -> I"),)


_BLOCKS: tuple[tuple[str, Callable[[Builder], tuple[fx.Node, ...]], tuple[str, ...], str], ...] = (
    ("first", _first, ("x", "scale"), "h0"),
    ("layers.0", lambda b: _layer(b, 0), ("h0",), "h1"),
    ("layers.1", lambda b: _layer(b, 1), ("h1",), "h2"),
    ("head", _last, ("h2", "scale", "y"), "loss"),
)

_SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def parameter_layout(name: str, mesh: Mesh) -> Layout:
    """Column-then-row on ``tp``; whole on ``dp``."""
    split = next((dim for end, dim in _SPLIT.items() if name.endswith(end)), None)
    on_tp = REPLICATE if split is None else shard(split)
    return tuple(on_tp if axis == "tp" else REPLICATE for axis in mesh.axes)


def activation_layout(mesh: Mesh) -> Layout:
    """Rows split on ``dp``, the same on ``tp``."""
    return tuple(shard(0) if axis == "dp" else INVARIANT for axis in mesh.axes)


def stage_program(
    mesh: Mesh,
    coordinates: tuple[int, ...],
    communicator: Communicator,
    *,
    blocks: range = range(4),
    recompute: str = "none",
    layouts: Mapping[str, Layout] | None = None,
    dtype: str = "float64",
) -> StageProgram:
    """The stage that runs ``blocks`` of the model, by hand."""
    rank = Rank(mesh, coordinates, communicator)
    programs = []
    owned: list[str] = []
    for position in blocks:
        name, build, inputs, output = _BLOCKS[position]
        builder = Builder(fx.Graph(), nn.Module(), rank, layouts or {})
        builder.graph.output(build(builder))
        names = tuple(n for n, _ in builder.root.named_parameters())
        owned.extend(names)
        programs.append(
            BlockProgram(
                name=name,
                kind="layer" if name.startswith("layers") else name,
                module=fx.GraphModule(builder.root, builder.graph),
                inputs=inputs,
                outputs=(output,),
                parameters=names,
                buffers=(),
                recompute=recompute,  # type: ignore[arg-type]
            )
        )
    needed = {key for program in programs for key in program.inputs}
    declared = {
        name: ParameterProgram(
            spec=TensorSpec(WEIGHTS[name], dtype, requires_grad=True),
            layout=(layouts or {}).get(name, parameter_layout(name, mesh)),
            shared=name == "scale",
        )
        for name in [*owned, *(["scale"] if "scale" in needed else [])]
    }
    rows = activation_layout(mesh)

    def boundary(position: int, source: int) -> Boundary:
        spec = TensorSpec((MICROBATCH, 6), dtype, requires_grad=True)
        return Boundary(f"h{position}", source, source + 1, spec, rows, rows)

    return StageProgram(
        index=int(blocks.start > 0),
        mesh=mesh,
        coordinates=coordinates,
        blocks=tuple(programs),
        parameters=declared,
        inputs={
            key: HeldValue(TensorSpec((MICROBATCH, width), dtype), rows)
            for key, width in (("x", 5), ("y", 3))
            if key in needed
        },
        buffers={},
        constants={},
        receives=(boundary(blocks.start - 1, 0),) if blocks.start > 0 else (),
        sends=(boundary(blocks.stop - 1, 0),) if blocks.stop < len(_BLOCKS) else (),
        layouts={"loss": (INVARIANT,) * len(mesh.axes)} if blocks.stop == len(_BLOCKS) else {},
        loss="loss" if blocks.stop == len(_BLOCKS) else None,
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest magnitude expected."""
    scale = expected.abs().max().clamp(min=1e-300)
    return float((found - expected).abs().max() / scale)


def device_mesh_of(mesh: Mesh, zero: int, degree: int = 0) -> DeviceMesh:
    """The device mesh of a stage on all ranks, with its groups of ``degree`` ranks."""
    devices, prediction = tuple(range(mesh.size)), StagePrediction({}, {})
    own = StagePlan((), devices, mesh, zero, {}, prediction, shard_degree=degree)
    return stage_mesh([own], "cpu")
