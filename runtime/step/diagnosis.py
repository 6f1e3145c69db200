"""Diagnosis of a loss or gradient that is not finite: the origin of the first such value.

In: the batches of a step whose loss or gradient is not finite. Out: the error that names the place.
The batches are run again, forward and backward, with the same weights and random numbers, and the
first of these places that is found is named:

1. a parameter that is not finite before the forward;
2. an input of the batch that is not finite;
3. the first block, in the order of the graph, with a NaN or infinity in an output (masks, through
   which no gradient flows, may hold infinities), and of its ops the first that made such a value;
4. the last parameter in the graph whose gradient is not finite: the backward comes to it first;
   and the op in whose backward the first gradient of an op's result was not finite.

Blocks run op by op (``OpCheck``), with the same collectives. Only an op whose inputs are finite is
named, so a mask of infinities, or its sum with another value, is not named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...passes.local.localize import MADE_BY
from ...planner.errors import AutoparallelError, RunError
from ...planner.graph.graph import Node
from ..messages.shared_objects import gather_values
from ..parameters.stage import StageBlock, StageModule

if TYPE_CHECKING:
    from ..parameters.parameters import StageParameter
    from .batch_runner import BatchRunner
    from .training_step import Used


WEIGHT, INPUT, OUTPUT, GRADIENT = range(4)
"""Kinds of values that may not be finite; the first kind found in this order is the cause."""


class Place(NamedTuple):
    """Place at which a value is not finite: ``what`` is a weight, input, output or gradient,
    ``where`` its stage, rank and micro-batch. ``position`` orders places of one ``kind``; the place
    that sorts first is the cause."""

    kind: int
    position: int
    microbatch: int
    what: str
    where: str


def not_finite(found: Iterable[Place]) -> AutoparallelError:
    """Return the error (AP910) that names the first place in ``found``: it caused the others."""
    places = sorted(found)
    if not places:
        return RunError(
            "AP910",
            "the loss or its gradient is not finite",
            why="all values were finite when the batch was run again, so they are close to the "
            "limits of their dtype",
            fix=ADVICE,
        )
    first = places[0]
    return RunError(
        "AP910", f"{first.what} is not finite", why=WHY[first.kind], where=first.where, fix=ADVICE
    )


WHY = {
    WEIGHT: "an earlier update, or the checkpoint or weights that training started from",
    INPUT: "the data contains it",
    OUTPUT: "the block's inputs and weights are finite",
    GRADIENT: "the outputs of all blocks are finite, so it arose in the backward",
}
ADVICE = (
    "inspect this batch and block; a smaller learning rate, warm-up or clipping (max_norm, "
    '--clip-norm) keeps values small; on_nan="skip" (--on-nan skip) skips such updates'
)


def is_finite(value: Any) -> bool:
    """Tell whether all elements of a tensor are finite; true for any other value."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())


def bad_inputs(batch: Mapping[Any, Any]) -> Iterator[Place]:
    """Yield a ``Place`` for each input that is not finite, with the input's first such row."""
    for position, (name, value) in enumerate(batch.items()):
        if not is_finite(value):
            rows = (~torch.isfinite(value)).reshape(value.shape[0] if value.ndim else 1, -1)
            row = int(rows.any(1).nonzero()[0])
            yield Place(INPUT, position, 0, f"input {name!r} of the batch", f"row {row}")


@contextmanager
def watching(modules: Mapping[str, nn.Module], found: Callable[[str, Any], None]) -> Iterator[None]:
    """Call ``found(name, outputs)`` after every forward of ``modules`` in the context."""
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(
                lambda _module, _inputs, outputs, name=name: found(name, outputs)
            )
            stack.callback(handle.remove)
        yield


def bad_outputs(outputs: Any) -> bool:
    """Tell whether a module's outputs have a NaN, or an infinity in a tensor that requires a
    gradient. Other tensors, such as masks, may have infinities."""
    parts = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if isinstance(outputs, Mapping):
        parts = tuple(outputs.values())
    return any(
        not is_finite(part) and (part.requires_grad or bool(part.isnan().any())) for part in parts
    )


def diagnosis(runner: BatchRunner, batches: Sequence[Used]) -> AutoparallelError:
    """Run the ``batches`` of a step again; return the error that names the first value that is not
    finite. Collective over all ranks. Afterwards the gradients are of the last batch that was run;
    buffers and the count of batches are as before."""
    if runner.progress is not None:
        runner.progress("looking for the first value that is not finite", ())
    buffers = runner.model.changing_buffers()
    kept, begun = {name: buffer.clone() for name, buffer in buffers.items()}, runner.batches_begun
    found: list[Place] = []
    for used in batches:
        runner.batches_begun = used.begun
        gathered = gather_values(_places(runner, used.batch))
        found = [Place(*place) for places in gathered for place in places]
        if found:
            break
    runner.batches_begun = begun
    for name, buffer in buffers.items():
        buffer.copy_(kept[name])
    return not_finite(found)


def _places(runner: BatchRunner, batch: Mapping[str, Tensor]) -> list[Place]:
    """Run a batch; return the places of all weights, inputs, outputs and gradients on this rank
    that are not finite."""
    position = {block.name: at for at, block in enumerate(runner.model.program.blocks.blocks)}
    places = list(bad_inputs(batch))
    blocks: dict[str, nn.Module] = {}
    for index, stage in runner.model.stages.items():
        for parameter in stage.by_name.values():
            if not is_finite(parameter.local):
                places.append(_of_parameter(WEIGHT, runner, index, parameter))
        blocks |= {f"{index} {block.name}": block for block in stage.blocks}
    checks = {index: _op_check(stage) for index, stage in runner.model.stages.items()}

    def look(key: str, outputs: Any) -> None:
        if bad_outputs(outputs):
            index, _, name = key.partition(" ")
            microbatch = runner.model.stages[int(index)].program.draws.microbatch
            where = f"stage {index}, rank {runner.model.rank}, micro-batch {microbatch}"
            made = checks[int(index)].forward
            what = f"the output of block {name}" + (f", made by {made.op}," if made else "")
            places.append(Place(OUTPUT, position[name], microbatch, what, where))
        checks[int(key.partition(" ")[0])].begin()

    with watching(blocks, look), ExitStack() as stack:
        for index, stage in runner.model.stages.items():
            stack.enter_context(op_by_op(stage, checks[index]))
        runner.backward(batch)
    for index, stage in runner.model.stages.items():
        for parameter in stage.by_name.values():
            if not is_finite(parameter.gradient):
                place = _of_parameter(GRADIENT, runner, index, parameter)
                if (made := checks[index].backward) is not None:
                    where = f"{place.where}, micro-batch {made.microbatch}"
                    what = f"{place.what}, after the backward of {made.op},"
                    place = place._replace(what=what, where=where)
                places.append(place)
    return places


def _op_check(stage: StageModule) -> OpCheck:
    return OpCheck(lambda: stage.program.draws.microbatch)


@contextmanager
def op_by_op(stage: StageModule, check: OpCheck) -> Iterator[None]:
    """Run the blocks of ``stage`` op by op in the context; ``check.see`` is called after each
    op."""
    kept = [(block, list(block.graphs)) for block in stage.blocks if isinstance(block, StageBlock)]
    for block, graphs in kept:
        block.graphs[:] = map(check.checked, graphs)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for block, graphs in kept:
            block.graphs[:] = graphs


def _of_parameter(kind: int, runner: BatchRunner, index: int, parameter: StageParameter) -> Place:
    """Return the ``Place`` of a parameter that is not finite (``kind`` is ``WEIGHT``), or of its
    gradient. Parameters sort by the first block, gradients by the last block, which a backward
    reaches first."""
    stage = runner.model.stages[index]
    names = [block.name for block in runner.model.program.blocks.blocks]
    at, block = 0, "several blocks"
    if parameter.block is not None:
        block = stage.program.blocks[parameter.block].name
        at = names.index(block)
    of = "parameter" if kind == WEIGHT else "the gradient of"
    what = f"{of} {parameter.name} ({block})"
    where = f"stage {index}, rank {runner.model.rank}"
    return Place(kind, at if kind == WEIGHT else -at, 0, what, where)


class Found(NamedTuple):
    """Description of an op whose result is not finite, and the micro-batch in which it ran."""

    op: str
    microbatch: int


class OpCheck:
    """Search for an op whose result is not finite: ``forward`` is the first such op in the forward
    of the current block, ``backward`` the first in the whole backward."""

    def __init__(self, microbatch: Callable[[], int]) -> None:
        self._microbatch = microbatch
        self.forward: Found | None = None
        self.backward: Found | None = None

    def begin(self) -> None:
        """Forget the op found in a block's forward, before the next block runs."""
        self.forward = None

    def checked(self, graph: fx.GraphModule) -> Callable[..., tuple[Tensor, ...]]:
        """Return a function that runs ``graph`` op by op, with a call of ``see`` after each."""

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = _Checking(graph, self).run(*inputs)
            return tuple(outputs)

        return run

    def see(self, node: fx.Node, read: tuple[Any, ...], made: Any) -> None:
        """Record the op ``node`` if the values ``made`` by it are not finite, though the values
        that it has ``read`` are. Hooks check the gradients of ``made`` in the backward."""
        microbatch = self._microbatch()
        is_bad = self.forward is None and not all(map(_is_finite, values_of(made)))
        if is_bad and all(map(_is_finite, values_of(read))):
            self.forward = Found(op_words(node), microbatch)
        for tensor in values_of(made):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                hook = partial(self._see_gradient, node, microbatch)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _see_gradient(self, node: fx.Node, microbatch: int, gradient: Tensor) -> None:
        if self.backward is None and not _is_finite(gradient):
            users = [op_words(user) for user in node.users if user.op != "output"]
            op = " or ".join(dict.fromkeys(users)) or f"what reads the result of {op_words(node)}"
            self.backward = Found(op, microbatch)


class _Checking(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, check: OpCheck) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._check = check

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op in ("call_function", "call_module", "call_method"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            self._check.see(n, (*args, *kwargs.values()), made)
        return made


def values_of(value: Any) -> Iterator[Any]:
    """Yield the tensors and floats in nested tuples and lists."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from values_of(part)
    elif isinstance(value, Tensor | float):
        yield value


def op_words(node: fx.Node) -> str:
    """Describe an op by its name, the path of the module that called it, and the user's source
    line. Layout conversions and ops compiled together have only a name."""
    made_by = node.meta.get(MADE_BY)
    if not isinstance(made_by, Node):
        return str(node.name)
    places = ", ".join(part for part in (made_by.module, made_by.source) if part)
    return f"{made_by.op or made_by.name}{f' ({places})' if places else ''}"


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())
