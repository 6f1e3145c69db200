"""Where the first value that is not finite came from.

In: the batches of a step whose loss or gradient is not finite. Out: the error that names the
place. The batches are run again, forward and backward, with the same weights and random
numbers, and in this order the first that is found is named:

1. a parameter that is not finite before the forward;
2. an input of the batch that is not;
3. the first block, in the order of the graph, with an output that is not (masks, through which
   no gradient flows, may hold infinities), and of its ops the first that made such a value;
4. the parameter whose gradient is not, the last one in the graph: the backward comes to it first;
   and the op in whose backward the first gradient of an op's result was not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...planner.errors import AutoparallelError, RunError
from ..messages.shared_objects import gather_values
from ..parameters.stage import StageBlock, StageModule
from .op_check import OpCheck

if TYPE_CHECKING:
    from ..parameters.parameters import StageParameter
    from .batch_runner import BatchRunner
    from .training_step import Used

WEIGHT, INPUT, OUTPUT, GRADIENT = range(4)
"""The kinds of places, in the order in which they are looked for."""


class Place(NamedTuple):
    """A value that is not finite; the least is the first cause.

    ``position`` orders places of one kind; ``where`` says the stage, rank and micro-batch.
    """

    kind: int
    position: int
    microbatch: int
    what: str
    where: str


def not_finite(found: Iterable[Place]) -> AutoparallelError:
    """The error that names the first of these places."""
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
    return RunError("AP910", f"{first.what} is not finite", why=WHY[first.kind],
                    where=first.where, fix=ADVICE)  # fmt: skip


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
    """Whether a value has no element, or only finite ones; what holds no numbers is."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.detach()).all())


def bad_inputs(batch: Mapping[Any, Any]) -> Iterator[Place]:
    """The inputs that are not finite, with the first row that is not."""
    for position, (name, value) in enumerate(batch.items()):
        if not is_finite(value):
            rows = (~torch.isfinite(value)).reshape(value.shape[0] if value.ndim else 1, -1)
            row = int(rows.any(1).nonzero()[0])
            yield Place(INPUT, position, 0, f"input {name!r} of the batch", f"row {row}")


@contextmanager
def watching(modules: Mapping[str, nn.Module], found: Callable[[str, Any], None]) -> Iterator[None]:
    """While inside, ``found(name, outputs)`` is told of every forward of these modules."""
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(
                lambda _module, _inputs, outputs, name=name: found(name, outputs)
            )
            stack.callback(handle.remove)
        yield


def bad_outputs(outputs: Any) -> bool:
    """Whether one of a module's outputs has a NaN, or, if a gradient flows through it, infinity.

    Masks hold infinities by right.
    """
    parts = outputs if isinstance(outputs, tuple | list) else (outputs,)
    if isinstance(outputs, Mapping):
        parts = tuple(outputs.values())
    return any(
        not is_finite(part) and (part.requires_grad or bool(part.isnan().any())) for part in parts
    )


def diagnosis(runner: BatchRunner, batches: Sequence[Used]) -> AutoparallelError:
    """The error for a step that used ``batches``. Collective over all ranks.

    Gradients are those of the last batch that was run again; buffers and the count of batches
    are as before.
    """
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
    """What is not finite on this rank."""
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
    """While inside, the blocks of ``stage`` run op by op and ``check`` sees each."""
    kept = [(block, list(block.graphs)) for block in stage.blocks if isinstance(block, StageBlock)]
    for block, graphs in kept:
        block.graphs[:] = map(check.checked, graphs)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for block, graphs in kept:
            block.graphs[:] = graphs


def _of_parameter(kind: int, runner: BatchRunner, index: int, parameter: StageParameter) -> Place:
    """A parameter, or its gradient; weights are looked for forward, gradients backward."""
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
