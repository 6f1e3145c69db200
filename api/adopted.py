"""The state of a model that trains by a plan, and what its calls do.

In: a model, what it is planned from, and calls as a script makes them. Out: in training the
results of the plan's program in the form of the model's own outputs; in evaluation what the
model's own code computes with whole weights. What would silently differ from the model alone is
refused, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoparallel.call_arguments import CallArguments
from autoparallel.passes.counter_random import batch_dims, counter_random
from autoparallel.passes.outputs import OutputForm, output_tensors
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning import CAPTURE_BATCH, PlanOptions
from autoparallel.runtime.arriving import arriving
from autoparallel.runtime.parameters import COMPUTE_DTYPES
from autoparallel.runtime.training_call import TrainingCall
from autoparallel.runtime.whole_weights import WholeWeights
from autoparallel.stale_optimizer import retire
from autoparallel.targets import Target
from autoparallel.whole_module import WholeModule

if TYPE_CHECKING:
    from autoparallel.passes.deferred_init import Deferred
    from autoparallel.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """What a model is planned from.

    ``deferred`` is a recorded build of it, whose weights are yet to be made; without it the model
    has its weights.
    """

    target: Target
    cluster: str
    options: PlanOptions
    deferred: Deferred | None = None


class Adopted:
    """One model's state. ``trainer`` is None until all ranks have joined.

    ``is_joining``: the model is being planned, and is used as the plain one. ``is_plain``: it
    holds whole weights for a while (``unsharded``).
    """

    def __init__(self, job: Job, original: type[nn.Module]) -> None:
        self.job = job
        self.original = original
        self.trainer: Trainer | None = None
        self.is_joining = False
        self.is_plain = False
        self.tell: Callable[..., None] = lambda *what: None

    @property
    def joined(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    def plans_for_loop(self) -> None:
        """Ask for a plan without a pipeline, unless stages are asked for.

        ``Step`` asks before anything else uses the model; a script's own loop has no other.
        """
        options = self.job.options
        if options.forced.pp is None and options.forced.schedule is None and not options.stage_at:
            forced = replace(options.forced, pp=1)
            self.job = replace(self.job, options=replace(options, forced=forced))

    def device_of(self, tensor: Tensor) -> torch.device:
        """Where a tensor is, or will be where the model has no weights yet."""
        return torch.device("cpu") if tensor.is_meta else tensor.device

    def join(self, model: nn.Module, job: Job, plan: Plan | None, buckets: Sequence[int]) -> None:
        """Plan the model and put this rank's shards in the place of its weights. Collective."""
        from autoparallel.joining import join_training

        self.is_joining = True
        was_training = model.training
        if not was_training:
            model.train()
        try:
            modes = [module.training for module in model.modules()]
            trainer = join_training(model, job, plan, self.tell, buckets)
        finally:
            if not was_training:
                model.eval()
            self.is_joining = False
        self.trainer = trainer
        self._has_loss_fn = job.target.loss_fn is not None
        tied = trainer.program.graph.tied
        self._weights = WholeWeights(trainer)
        self._whole = WholeModule(model, self._weights, tied)
        self._modules = tuple(zip(model.modules(), modes, strict=True))
        self._hooks = tuple(hooks for module, _ in self._modules[1:] for hooks in _hooks_of(module))
        self._num_hooks = self._count_hooks()
        example = job.target.example_batch(CAPTURE_BATCH, job.options.seq)
        forward = self.original.forward.__get__(model)
        self._arguments = CallArguments(
            forward, example, trainer.program.inputs, extra=self._has_loss_fn
        )
        self._frozen = [p for p in trainer.parameters.values() if not p.spec.requires_grad]
        self._calls: TrainingCall | None = None
        if not trainer.plan.has_pipeline:
            (executor,) = trainer.executors.values()
            self._calls = TrainingCall(executor, self.tell)
        self._put_shards(model)

    def _put_shards(self, model: nn.Module) -> None:
        """The masters in the places of the model's parameters, changing buffers in theirs."""
        trainer = self.joined
        buffers = trainer.changing_buffers()
        for name, slots in self._whole.slots.items():
            held = trainer.parameters.get(name)
            value = buffers.get(name) if held is None else held.master
            for module, attribute in slots:
                old = getattr(module, attribute)
                setattr(module, attribute, value)
                if isinstance(old, nn.Parameter) and old is not value:
                    retire(old, f"{type(model).__name__}.{name}")

    def own_part(self, model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with whole tensors cut to this rank's shards, without other stages'."""
        tied = self.joined.program.graph.tied
        own: dict[str, Any] = {}
        for name, value in state.items():
            first = tied.get(name, name)
            if self._weights.is_elsewhere(first):
                continue
            if isinstance(value, Tensor) and first in self._whole.slots:
                value = self._weights.cut(first, value)
            own[name] = value
        return own

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call of the model, as its own ``forward`` is called."""
        if self.is_joining or self.is_plain:
            return self.original.forward(model, *args, **kwargs)
        model._join_once()  # type: ignore[operator]
        if not model.training:
            return self._evaluate(model, args, kwargs)
        return self._train(model, args, kwargs)

    def _train(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The plan's program on a batch: the loss, or the outputs that the caller's loss takes."""
        trainer = self.joined
        if self._calls is None:
            raise UsageError(
                "AP146",
                "a plan with a pipeline has no loss to call backward on",
                why="its backwards start while other micro-batches are still in their forward",
                fix="step = autoparallel.Step(model); loss = step(batch), "
                'or plan without one: parallel="pp=1"',
            )
        self._check_unchanged()
        inputs = trainer.fitted(self._arguments.inputs(args, kwargs))
        form = trainer.program.outputs
        if trainer.program.returned:
            assert form is not None
            made = self._calls.outputs(inputs)
            return form.build(None, _merged(made, form, _Again(self, model, args, kwargs)))
        loss = self._calls.loss(inputs)
        if self._has_loss_fn or form is None or len(form.leaves) == 1:
            return loss
        return form.build(loss, _Again(self, model, args, kwargs).leaf)

    def _evaluate(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's own forward, with the weights of each layer gathered for it."""
        for stage in self.joined.stages.values():
            stage.keep_buffers()
        outputs = self._run_whole(model, args, kwargs)
        if not torch.is_grad_enabled():
            return outputs
        refuse = _refusal(
            "AP921",
            "a backward in evaluation mode",
            "the model's eval() runs without gradients",
            "call model.train() before what is trained, torch.no_grad() around what is not",
        )
        return tree_map_only(Tensor, refuse, outputs)

    def _run_whole(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        dtype = COMPUTE_DTYPES[self.joined.plan.model.precision]

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = tree_map_only(Tensor, cast, (args, dict(kwargs)))
        self.tell("gathering weights and computing the model's own forward")
        try:
            with torch.no_grad(), self._whole.gathered_by_layer():
                return self.original.forward(model, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UsageError(
                "AP931",
                "the model reads a weight of a layer that it does not call",
                why="weights are gathered layer by layer, as layers are called",
                fix="with model.unsharded(): ... gathers all of them at once",
            ) from error
        finally:
            self.tell("between steps")

    @contextmanager
    def unsharded(
        self, model: nn.Module, rank: int | None, device: torch.device | str | None
    ) -> Iterator[None]:
        """See ``ParallelModule.unsharded``."""
        if self.is_plain:
            yield
            return
        for stage in self.joined.stages.values():
            stage.keep_buffers()
        wanted = rank is None or rank == self.joined.rank
        tensors: dict[str, Tensor] = {}
        for name in self._weights.names:
            value = self._weights.gather((name,), as_computed=False)[name]
            if wanted:
                moved = value.to(device) if device is not None else value
                tensors[name] = moved.clone() if moved is value else moved
        versions = {name: tensor._version for name, tensor in tensors.items()}
        self.is_plain = True
        try:
            with self._whole.all_in_place(tensors):
                yield
        finally:
            self.is_plain = False
        trained = {node.name for node in self.joined.program.graph.parameters}
        changed = [
            name
            for name, tensor in tensors.items()
            if name in trained and tensor._version != versions[name]
        ]
        if changed:
            raise UsageError(
                "AP926",
                f"{changed[0]} was changed inside unsharded(), and the change is lost",
                why="the whole weights are copies; the shards are what is trained",
                fix="state = model.state_dict() inside, model.load_state_dict(state) after it",
            )

    def _check_unchanged(self) -> None:
        """Raise where the modules are in other modes, or have hooks, that the program knows not."""
        for module, mode in self._modules:
            if module.training is not mode:
                raise UsageError(
                    "AP922",
                    f"the mode of {self._path(module)} changed after the model was planned",
                    why=f"the plan's program computes it with training={mode}",
                    fix="call train() and eval() on parts of the model before parallelize",
                )
        if self._count_hooks() != self._num_hooks:
            raise UsageError(
                "AP923",
                "a hook was put on a submodule after the model was planned",
                why="in training the plan's program runs in the submodules' place",
                fix="put hooks on the model itself or on its parameters, remove them, "
                "or register them before parallelize",
            )
        for parameter in self._frozen:
            if parameter.master.requires_grad:
                raise UsageError(
                    "AP929",
                    f"{parameter.name} is to be trained, but was frozen when the model was planned",
                    fix="set requires_grad before parallelize; freezing later is possible",
                )

    def _count_hooks(self) -> int:
        return sum(map(len, self._hooks))

    def _path(self, module: nn.Module) -> str:
        names = {other: name for name, other in self._modules[0][0].named_modules()}
        return names.get(module) or "the model"


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip


def _merged(made: Sequence[Tensor], form: OutputForm, again: _Again) -> Callable[[int], Tensor]:
    """The outputs that were ``made``; those that have no gradient are made when they are used."""
    tensors = [leaf for leaf in form.leaves if leaf.kind == "tensor"]
    places = [at for at, leaf in enumerate(tensors) if leaf.is_differentiable]
    found = dict(zip(places, made, strict=True))
    return lambda at: found[at] if at in found else again.leaf(at)


class _Again:
    """Outputs besides the loss: made when somebody uses one, by the model's own forward.

    That draws the same random numbers. It must come before the weights change.
    """

    def __init__(
        self, adopted: Adopted, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        assert adopted._calls is not None
        self._adopted, self._model = adopted, model
        self._args, self._kwargs = args, dict(kwargs)
        self._key = adopted._calls.step_key
        self._versions = self._weight_versions()
        self._made: list[Tensor] | None = None

    def leaf(self, position: int) -> Tensor:
        """The tensor at ``position`` among the outputs besides the loss."""
        return arriving(_Leaf(self, position), torch.empty(0))

    def value(self, position: int) -> Tensor:
        if self._made is None:
            self._made = self._run()
        return self._made[position]

    def _weight_versions(self) -> list[int]:
        parameters = self._adopted.joined.parameters.values()
        return [parameter.local._version for parameter in parameters]

    def _run(self) -> list[Tensor]:
        trainer = self._adopted.joined
        if self._weight_versions() != self._versions:
            raise UsageError(
                "AP927",
                "an output of the model is used after its weights have changed",
                why="outputs besides the loss are made when they are used, to cost nothing else",
                fix="use them before optimizer.step()",
            )
        graph, count = trainer.program.graph, trainer.plan.num_microbatches
        if graph.accumulation.mixing and count > 1:
            mixing = graph.accumulation.mixing[0]
            raise UsageError(
                "AP928",
                "outputs besides the loss are not known under this plan",
                why=f"rows see each other ({mixing}), in {count} micro-batches",
                fix='plan with parallel="microbatches=1"',
            )
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(counter_random(self._key, batch_dims=batch_dims(graph)))
            outputs = self._adopted._run_whole(self._model, self._args, self._kwargs)
        assert trainer.program.outputs is not None
        refuse = _refusal(
            "AP928",
            "a gradient through an output of the model other than its loss",
            "a model that returns its loss is differentiated by that alone",
            "add the term to the loss in the model, or parallelize with loss_fn, or let the "
            "model return no loss",
        )
        return [refuse(value) for value in output_tensors(outputs, trainer.program.outputs)]


@dataclass(frozen=True, slots=True)
class _Leaf:
    again: _Again
    position: int

    def value(self) -> Tensor:
        return self.again.value(self.position)


class _Refused(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, error: UsageError) -> Tensor:
        ctx.error = error
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ctx.error


def _refusal(code: str, what: str, why: str, fix: str) -> Callable[[Tensor], Tensor]:
    """A function that gives a floating tensor a backward which says what is wrong."""
    error = UsageError(code, what, why=why, fix=fix)

    def refuse(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True)
            refused: Tensor = _Refused.apply(anchor, tensor, error)  # type: ignore[no-untyped-call]
        return refused

    return refuse
