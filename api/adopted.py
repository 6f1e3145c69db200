"""The state of a model that trains by a plan, and what its calls do.

In: a model, what it is planned from, and calls as a script makes them. Out: in training the
results of the plan's program in the form of the model's own outputs; in evaluation what the
model's own code computes with whole weights. What would silently differ from the model alone is
refused, with what to do instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from autoparallel.at_start import as_at_start
from autoparallel.call_arguments import CallArguments
from autoparallel.first_step import compare_first_step, projection
from autoparallel.passes.capture.counter_random import batch_dims, counter_random
from autoparallel.passes.programs.outputs import OutputForm, output_tensors
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning import PlanOptions
from autoparallel.refused_gradient import refusal
from autoparallel.runtime.arriving import arriving
from autoparallel.runtime.batches import marked
from autoparallel.runtime.global_values import read_whole_values, take_norms_of_empty_shards
from autoparallel.runtime.parameters import COMPUTE_DTYPES, get_by_path
from autoparallel.runtime.share_batch import ShareBatch
from autoparallel.runtime.shared import share_in_place
from autoparallel.runtime.training_call import TrainingCall
from autoparallel.runtime.whole_weights import WholeWeights
from autoparallel.stale_optimizer import is_retired, retire
from autoparallel.targets import Target, captured_batch
from autoparallel.unchanged import Unchanged, check_autocast, check_backward_hooks
from autoparallel.whole_module import WholeModule

if TYPE_CHECKING:
    from autoparallel.passes.initialization.deferred_init import Deferred
    from autoparallel.runtime.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Job:
    """What a model is planned from.

    ``deferred`` is a recorded build of it, whose weights are yet to be made; without it the model
    has its weights. ``weights`` is a file or folder of its initial weights (see
    ``runtime.pretrained``).
    """

    target: Target
    cluster: str
    options: PlanOptions
    deferred: Deferred | None = None
    weights: str | Path | None = None
    weights_partial: bool = False
    allow_idle: bool = False
    check_first_step: bool | None = None


class Adopted:
    """One model's state. ``trainer`` is None until all ranks have joined.

    ``is_joining``: the model is being planned, and is used as the plain one. ``is_plain``: it
    holds whole weights for a while (``unsharded``).
    """

    def __init__(self, job: Job, forward: Callable[..., Any]) -> None:
        self.job = job
        self._forward = forward
        self.trainer: Trainer | None = None
        self.is_joining = False
        self.is_plain = False
        self.tell: Callable[..., None] = lambda *what: None
        self.timeout_seconds: float | None = None

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

        check_backward_hooks(model)
        self._check_unwritten(model)
        self.is_joining = True
        was_training = model.training
        if not was_training:
            model.train()
        try:
            modes = [module.training for module in model.modules()]
            with as_at_start():
                trainer, self._following = join_training(
                    model, job, plan, self.tell, buckets, self.timeout_seconds
                )
        finally:
            if not was_training:
                model.eval()
            self.is_joining = False
        self.trainer = trainer
        self.job = replace(job, deferred=None)  # the weights are made
        self._has_loss_fn = job.target.loss_fn is not None
        tied = trainer.program.graph.tied
        self._weights = WholeWeights(trainer.model)
        self._whole = WholeModule(model, self._weights, tied)
        self._fixed = [(name, *get_by_path(model, name)) for name in trainer.model.fixed_buffers()]
        self._marks: dict[str, tuple[int, int]] = {}
        example = captured_batch(job.target, job.options.global_batch, job.options.seq)
        self._arguments = CallArguments(
            self._forward, example, trainer.program.inputs, extra=self._has_loss_fn
        )
        self._calls: TrainingCall | None = None
        if trainer.runner.executors and not trainer.plan.has_pipeline:
            (executor,) = trainer.runner.executors.values()
            self._calls = TrainingCall(executor, self.tell)
        self._put_shards(model)
        read_whole_values()
        take_norms_of_empty_shards(p.master for p in trainer.model.parameters.values())
        trainer.model.beside.update(
            (name, parameter)
            for name, parameter in model.named_parameters()
            if tied.get(name, name) not in self._whole.slots
        )
        self._unchanged = Unchanged(model, modes, trainer.model.parameters, self._whole.slots)
        trainer.runner.captures = self._capture_now
        compare_first_step(
            trainer, self._following, lambda: model,
            asked=job.check_first_step, as_plain=self._as_plain,
            run=self._backward_of_outputs if trainer.program.returned else None,
        )  # fmt: skip

    def _capture_now(self, rows: int) -> int:
        """The number of the capture that a batch is computed by, as the model is now."""
        self._unchanged.check()
        return self._following(rows)

    @contextmanager
    def _as_plain(self) -> Iterator[None]:
        """While inside, calls of the model are its own forward."""
        before, self.is_plain = self.is_plain, True
        try:
            yield
        finally:
            self.is_plain = before

    def _backward_of_outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Differentiate a projection of the model's outputs, which it returns."""
        assert self._calls is not None
        outputs = self._calls.outputs(self.joined.runner.fit(inputs))
        loss = projection(outputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _put_shards(self, model: nn.Module) -> None:
        """The masters in the places of the model's parameters, changing buffers in theirs."""
        trainer = self.joined
        buffers = trainer.model.changing_buffers()
        for name, slots in self._whole.slots.items():
            held = trainer.model.parameters.get(name)
            value = buffers.get(name) if held is None else held.master
            for module, attribute in slots:
                old = getattr(module, attribute)
                setattr(module, attribute, value)
                is_replaced = isinstance(old, nn.Parameter) and old is not value
                if is_replaced and not is_retired(old):  # a tied one is seen under each name
                    if isinstance(value, nn.Parameter):
                        _take_over(value, old)
                    retire(old, f"{type(model).__name__}.{name}")

    def take_untrained(self, model: nn.Module) -> None:
        """See ``ParallelModule.take_untrained``."""
        tied = self.joined.program.graph.tied
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tied.get(name, name) not in self._whole.slots:
                loaded = self.joined.model.untrained.get(name)
                if loaded is not None:
                    tensor.data.copy_(loaded)
                share_in_place(tensor.data)

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with whole tensors cut to this rank's shards, without other stages'."""
        tied = self.joined.program.graph.tied
        own: dict[str, Any] = OrderedDict()
        if hasattr(state, "_metadata"):
            own._metadata = state._metadata  # type: ignore[attr-defined]
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
        if self.is_joining or self.is_plain or torch.compiler.is_exporting():
            return self._forward(*args, **kwargs)
        model._join_once()  # type: ignore[operator]
        if not model.training:
            return self._evaluate(args, kwargs)
        return self._train(args, kwargs)

    def _check_unwritten(self, model: nn.Module) -> None:
        """Raise where a script wrote to weights that are yet to be made: that did nothing."""
        tensors = (*nn.Module.named_parameters(model), *model.named_buffers())
        for name, tensor in tensors if self.job.deferred is not None else ():
            if not tensor.is_meta or tensor._version:
                raise UsageError(
                    "AP939",
                    f"{name} was written before the model has weights",
                    why="a model of a parallel class gets its weights when it is planned",
                    fix="initialize it in __init__, or pass an object of the class to parallelize",
                )

    def keep_buffers(self) -> None:
        """Have buffers as the last forward left them, though its backward is yet to come."""
        if self.trainer is not None:
            for stage in self.trainer.model.stages.values():
                stage.keep_buffers()

    def _train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
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
        check_autocast(trainer.model.device, trainer.plan.model.precision)
        self._take_buffers()
        inputs = trainer.runner.fit(marked(self._arguments.inputs(args, kwargs)))
        if torch.is_grad_enabled() and any(value.requires_grad for value in inputs.values()):
            raise UsageError(
                "AP933",
                "an input of the model requires a gradient",
                why="each rank computes the gradient of its own part of the batch only",
                fix="detach() the input, or move the code that computes it into the model",
            )
        form = trainer.program.outputs
        is_share = isinstance(inputs, ShareBatch)
        run = self._calls.outputs if trainer.program.returned else self._calls.loss
        with torch.autocast(trainer.model.device.type, enabled=False):
            made: Any = run(inputs)
        if trainer.program.returned:
            assert form is not None
            return form.build(
                None, _merged(made, form, _Again(self, args, kwargs, is_share=is_share))
            )
        if self._has_loss_fn or form is None:
            return made
        if len(form.leaves) == 1:
            return form.build(made, lambda position: made)
        return form.build(made, _Again(self, args, kwargs, is_share=is_share).leaf)

    def _evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's own forward, with the weights of each layer gathered for it."""
        self._unchanged.check_data()
        self.keep_buffers()
        outputs = self._run_whole(args, kwargs, keeps_buffers=True)
        if not torch.is_grad_enabled():
            return outputs
        refuse = refusal(
            "AP921",
            "a backward in evaluation mode",
            "the model's eval() runs without gradients",
            "call model.train() before what is trained, torch.no_grad() around what is not",
        )
        return tree_map_only(Tensor, refuse, outputs)

    def _run_whole(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keeps_buffers: bool
    ) -> Any:
        dtype = COMPUTE_DTYPES[self.joined.plan.model.precision]

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = tree_map_only(Tensor, cast, (args, dict(kwargs)))
        self.tell("gathering weights and computing the model's own forward")
        try:
            with (
                torch.no_grad(),
                self._following.own_forward(),
                self._whole.gathered_by_layer(keeps_buffers=keeps_buffers),
            ):
                return self._forward(*args, **kwargs)
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
        self.keep_buffers()
        wanted = rank is None or rank == self.joined.model.rank
        tensors: dict[str, Tensor] = {}
        for name in self._weights.names:
            value = self._weights.gather((name,), as_computed=False)[name]
            if wanted:
                moved = value.to(device) if device is not None else value
                tensors[name] = moved.clone() if moved is value else moved
        self.is_plain = True
        try:
            with self._whole.all_in_place(tensors):
                yield
                changed = self._changed_in_place()
        finally:
            self.is_plain = False
        if changed:
            raise UsageError(
                "AP926",
                f"{changed[0]} was changed inside unsharded(), and the change is lost",
                why="the unsharded weights are copies; training updates the shards",
                fix="call state = model.state_dict() inside and model.load_state_dict(state) "
                "after it",
            )

    def _changed_in_place(self) -> list[str]:
        """The names of whole tensors in the model that differ from this rank's shards."""
        changed = []
        for name, slots in self._whole.slots.items():
            for module, attribute in slots:
                value = getattr(module, attribute)
                if isinstance(value, Tensor) and not self._weights.is_current(name, value):
                    changed.append(name)
        return changed

    def _take_buffers(self) -> None:
        """Have the program compute with the buffers' values as the script has left them.

        Training does not change them, but a script may: by writing to them, by putting another
        tensor in their place, by loading a state dict.
        """
        held = {name: module._buffers.get(attribute) for name, module, attribute in self._fixed}
        given = {name: value for name, value in held.items() if value is not None}
        marks = {name: (id(value), value._version) for name, value in given.items()}
        if marks != self._marks:
            self.joined.take_buffers(given)
            self._marks = marks


def _take_over(master: nn.Parameter, old: nn.Parameter) -> None:
    """Give ``master`` the hooks and the attributes that a script put on the parameter before."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None):
            setattr(master, hooks, getattr(old, hooks))
    for name, value in old.__dict__.items():
        master.__dict__.setdefault(name, value)


def _merged(made: Sequence[Tensor], form: OutputForm, again: _Again) -> Callable[[int], Tensor]:
    """The outputs that were ``made``; those that have no gradient are made when they are used."""
    tensors = [leaf for leaf in form.leaves if leaf.kind == "tensor"]
    places = [at for at, leaf in enumerate(tensors) if leaf.is_differentiable]
    found = dict(zip(places, made, strict=True))
    return lambda at: found[at] if at in found else again.leaf(at)


class _Again:
    """Outputs besides the loss: made when somebody uses one, by the model's own forward.

    That draws the same random numbers as the last forward of the plan's program. It must come
    before the weights or the call's arguments change.
    """

    def __init__(
        self, adopted: Adopted, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_share: bool
    ) -> None:
        assert adopted._calls is not None
        self._adopted = adopted
        self._args, self._kwargs = args, dict(kwargs)
        self._key = adopted._calls.step_key
        self._versions = self._weight_versions()
        self._is_share = is_share
        self._made: list[Tensor] | None = None

    def leaf(self, position: int) -> Tensor:
        """The tensor at ``position`` among the outputs besides the loss."""
        return arriving(_Leaf(self, position), torch.empty(0))

    def value(self, position: int) -> Tensor:
        if self._made is None:
            self._made = self._run()
        return self._made[position]

    def _weight_versions(self) -> list[int]:
        """Counts of changes: of the weights, and of the call's arguments."""
        parameters = self._adopted.joined.model.parameters.values()
        given = tree_flatten((self._args, self._kwargs))[0]
        return [
            *(parameter.local._version for parameter in parameters),
            *(value._version for value in given if isinstance(value, Tensor)
              and not value.is_inference()),
        ]  # fmt: skip

    def _run(self) -> list[Tensor]:
        trainer = self._adopted.joined
        if self._weight_versions() != self._versions:
            raise UsageError(
                "AP927",
                "an output of the model is used after its weights or its inputs have changed",
                why="outputs other than the loss are computed only when they are used",
                fix="use them before optimizer.step()",
            )
        graph, count = trainer.program.graph, trainer.plan.num_microbatches
        if self._is_share and batch_dims(graph):
            raise UsageError(
                "AP928",
                "outputs other than the loss cannot be computed for a part of the batch",
                why="their random numbers depend on the whole batch",
                fix="give every rank the global batch where its outputs are used",
            )
        if graph.accumulation.mixing and count > 1:
            mixing = graph.accumulation.mixing[0]
            raise UsageError(
                "AP928",
                "outputs other than the loss cannot be computed under this plan",
                why=f"samples depend on each other ({mixing}), and the plan has {count} "
                "micro-batches",
                fix='plan with parallel="microbatches=1"',
            )
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(counter_random(self._key, batch_dims=batch_dims(graph)))
            outputs = self._adopted._run_whole(self._args, self._kwargs, keeps_buffers=False)
        assert trainer.program.outputs is not None
        refuse = refusal(
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

    def host_value(self) -> Tensor:
        return self.value()
