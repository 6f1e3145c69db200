"""State of a model that trains by a plan, and the handling of its calls.

In: a model, the input of its planning, and the calls of a script. Out: in training, the results of
the plan's program in the form of the model's outputs; in evaluation, the results of the model's own
code with whole weights. A call whose result would silently differ from the plain model's raises an
error with a fix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from autoparallel.adoption.guards import ModelGuard, check_autocast, check_backward_hooks
from autoparallel.adoption.job import PlanJob
from autoparallel.adoption.join import join_training
from autoparallel.adoption.unsharded import WholeModule
from autoparallel.calls.arguments import CallArguments
from autoparallel.calls.first_step import compare_first_step, projection
from autoparallel.calls.form import PLANNED, Form
from autoparallel.calls.modes import as_at_start
from autoparallel.calls.other_outputs import OtherOutputs, merge_outputs, refuse_gradient
from autoparallel.calls.stale_tensors import is_retired, retire_tensor
from autoparallel.passes.tracing.modes import unmoved_modules
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.data.batches import mark_inputs
from autoparallel.runtime.data.rank_batch import ShareBatch
from autoparallel.runtime.data.variants import Buckets
from autoparallel.runtime.messages.shared_objects import share_in_place
from autoparallel.runtime.parameters.global_values import (
    draw_whole_values,
    read_whole_values,
    take_lists_of_shards,
    whole,
)
from autoparallel.runtime.parameters.parameters import COMPUTE_DTYPES, get_by_path
from autoparallel.runtime.step.training_call import TrainingCall
from autoparallel.runtime.step.whole_weights import WholeWeights
from autoparallel.runtime.update.chosen_gradients import differentiate_chosen

OTHER_FORMS = ("AP130", "AP836", "AP920", "AP940")
"""Error codes of calls whose arguments the plan's program cannot compute. Without gradients the
model's own forward runs instead."""

if TYPE_CHECKING:
    from autoparallel.passes.programs.outputs import OutputForm
    from autoparallel.runtime.step.trainer import Trainer


class ParallelState:
    """State of a parallel model. ``trainer`` is None until all ranks have joined.

    ``is_joining``: the model is being planned, and acts as the plain model. ``is_plain``: it holds
    whole weights inside a context such as ``unsharded``, and also acts as the plain model.
    """

    def __init__(self, job: PlanJob, forward: Callable[..., Any]) -> None:
        self.job = job
        self._forward = forward
        self.trainer: Trainer | None = None
        self.is_joining = False
        self.is_plain = False
        self._is_gathered = False
        self._is_unsharded = False
        self.tell: Callable[..., None] = lambda *what: None
        self.timeout_seconds: float | None = None

    @property
    def joined(self) -> Trainer:
        assert self.trainer is not None
        return self.trainer

    @property
    def outputs(self) -> OutputForm | None:
        """Structure (nested containers and tensors) of the outputs of the model's current call."""
        return self._following.outputs

    @property
    def computes_plainly(self) -> bool:
        """Return whether a call of the model now runs its own forward, without the plan."""
        is_own = self.is_joining or self.is_plain or self._is_gathered
        return is_own or torch.compiler.is_exporting()

    @property
    def leaves_own_hooks(self) -> bool:
        """Return whether a call of the model now must skip the script's hooks and ``__call__``.

        This holds while the forward is captured: hooks run around the captured program later.
        """
        return self.computes_plainly and not (self._is_gathered or self._is_unsharded)

    def plans_for_loop(self) -> None:
        """Request a plan without a pipeline, unless the options ask for stages.

        Called when the model is used before a ``Step``: a script's own loop cannot run a pipeline.
        """
        options = self.job.options
        if options.forced.pp is None and options.forced.schedule is None and not options.stage_at:
            forced = replace(options.forced, pp=1)
            self.job = replace(self.job, options=replace(options, forced=forced))

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return a tensor's device, or the CPU for a meta tensor."""
        return torch.device("cpu") if tensor.is_meta else tensor.device

    def join(self, model: nn.Module, job: PlanJob, plan: Plan | None, buckets: Buckets) -> None:
        """Plan the model and replace its weights by this rank's shards. Collective."""
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
                    model, self._forward, job, plan, self.tell, buckets, self.timeout_seconds
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
        fixed = sorted(trainer.model.fixed_buffers())  # as on the ranks of other stages
        self._fixed = [(name, *get_by_path(model, name)) for name in fixed]
        self._marks: dict[str, tuple[int, int]] = {}
        assert trainer.program.example is not None
        self._arguments = CallArguments(
            self._forward, trainer.program.example, trainer.program.inputs, extra=self._has_loss_fn
        )
        self._form = PLANNED
        self.calls: TrainingCall | None = None
        if trainer.runner.executors and not trainer.plan.has_pipeline:
            (executor,) = trainer.runner.executors.values()
            self.calls = TrainingCall(executor, self.tell)
        self._put_shards(model)
        read_whole_values()
        masters = [parameter.master for parameter in trainer.model.parameters.values()]
        take_lists_of_shards(masters)
        differentiate_chosen(masters)
        draw_whole_values(masters)
        trainer.model.beside.update(
            (name, parameter)
            for name, parameter in model.named_parameters()
            if tied.get(name, name) not in self._whole.slots
        )
        self._guard = ModelGuard(model, modes, trainer.model.parameters, self._whole.slots)
        trainer.runner.captures = self._capture_now
        compare_first_step(
            trainer,
            self._following,
            lambda: model,
            asked=job.check_first_step,
            form=lambda: self._form,
            as_plain=self.as_plain,
            run=self._backward_of_outputs if trainer.program.returned else None,
        )

    def _capture_now(self, rows: int) -> int:
        """Return the index of the captured program for a batch of ``rows`` samples and the present
        code and Python state of the model."""
        self._guard.check()
        return self._following(rows, self._form)

    @contextmanager
    def as_plain(self) -> Iterator[None]:
        """Make calls of the model run its own forward inside the context."""
        before, self.is_plain = self.is_plain, True
        try:
            yield
        finally:
            self.is_plain = before

    def _backward_of_outputs(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run forward and backward, with a weighted sum of all outputs in place of a loss; return
        the sum. It serves the comparison of the first step with the model alone."""
        assert self.calls is not None
        outputs = self.calls.outputs(self.joined.runner.fit(inputs))
        loss = projection(outputs)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _put_shards(self, model: nn.Module) -> None:
        """Replace the model's parameters and the buffers that training changes by own shards."""
        trainer = self.joined
        buffers = trainer.model.changing_buffers()
        for name, slots in self._whole.slots.items():
            held = trainer.model.parameters.get(name)
            value = buffers.get(name) if held is None else held.master
            for module, attribute in slots:
                old = getattr(module, attribute)
                setattr(module, attribute, value)
                is_replaced = isinstance(old, Tensor) and old is not value
                if is_replaced and not is_retired(old):  # a tied parameter is seen under each name
                    if isinstance(value, nn.Parameter):
                        _take_over(value, old)
                    retire_tensor(old, f"{type(model).__name__}.{name}")

    def take_untrained(self, model: nn.Module) -> None:
        """Copy the values of untrained tensors from the checkpoint loaded last into the model."""
        tied = self.joined.program.graph.tied
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tied.get(name, name) not in self._whole.slots:
                loaded = self.joined.model.untrained.get(name)
                if loaded is not None:
                    tensor.data.copy_(loaded)
                share_in_place(tensor.data)

    def own_part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Cut whole tensors of a state dict to this rank's shards; drop other stages' tensors."""
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
        """Carry out a call of the model: its own forward while it is planned, the plan's forward in
        training mode, a forward with gathered weights in evaluation mode."""
        if self.computes_plainly:
            return self._forward(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, whole, (args, dict(kwargs)))
        model._join_once()  # type: ignore[operator]
        if not model.training:
            return self._evaluate(args, kwargs)
        if torch.is_grad_enabled():
            return self._train(args, kwargs)
        try:
            return self._train(args, kwargs)
        except UsageError as error:
            if error.code not in OTHER_FORMS:
                raise
            return self.run_own(args, kwargs)

    def _check_unwritten(self, model: nn.Module) -> None:
        """Raise UsageError AP939 if a script wrote to weights that are still meta tensors."""
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
        """Store the buffers that the last forward updated, even if its backward has not run yet."""
        if self.trainer is not None:
            for stage in self.trainer.model.stages.values():
                stage.keep_buffers()

    def _train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the plan's program on a batch; return the loss, or outputs for the script's loss."""
        trainer = self.joined
        if self.calls is None:
            raise UsageError(
                "AP146",
                "a plan with a pipeline has no loss to call backward on",
                why="its backwards start while other micro-batches are still in their forward",
                fix="step = autoparallel.Step(model); loss = step(batch), "
                'or plan without one: parallel="pp=1"',
            )
        check_autocast(trainer.model.device, trainer.plan.model.precision)
        self.take_buffers()
        read, fixed = self._arguments.read(args, kwargs)
        given = mark_inputs(read)
        differentiated = self._inputs_with_gradients(given)
        places, planned = trainer.program.inputs, trainer.program.graph
        self._form = Form(
            frozenset(places[n].path for n in differentiated if not planned[n].spec.requires_grad),
            fixed,
        )
        inputs = trainer.runner.fit(given)
        form = self.outputs
        is_share = isinstance(inputs, ShareBatch)
        if differentiated and is_share:
            raise UsageError(
                "AP933",
                f"{self._arguments.text(differentiated[0])} requires a gradient, and each rank has "
                "its own rows of it",
                why="gradients of inputs are computed for global batches, the same on every rank",
                fix="give every rank the global batch, or detach() the input if nothing before "
                "the model is trained through it",
            )
        run = self.calls.outputs if trainer.program.returned else self.calls.loss
        with torch.autocast(trainer.model.device.type, enabled=False):
            made: Any = run(inputs)
        if trainer.program.returned:
            assert form is not None
            return form.build(
                None, merge_outputs(made, form, OtherOutputs(self, args, kwargs, is_share=is_share))
            )
        if self._has_loss_fn or form is None:
            return made
        if len(form.leaves) == 1:
            return form.build(made, lambda position: made)
        return form.build(made, OtherOutputs(self, args, kwargs, is_share=is_share).leaf)

    def _inputs_with_gradients(self, inputs: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the inputs that require a gradient.

        Raises UsageError AP933 if there are any and the plan has several micro-batches.
        """
        count = self.joined.plan.num_microbatches
        if not torch.is_grad_enabled():
            return []
        found = [name for name, value in inputs.items() if value.requires_grad]
        if found and count > 1:
            raise UsageError(
                "AP933",
                f"{self._arguments.text(found[0])} requires a gradient, and the plan has "
                f"{count} micro-batches",
                why="the backwards of micro-batches run before the script's own",
                fix='plan with parallel="microbatches=1", or detach() the input if nothing before '
                "the model is trained through it",
            )
        return found

    def _evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own forward; each layer gathers its whole weights when it runs."""
        self._guard.check_data()
        self.keep_buffers()
        outputs = self.run_own(args, kwargs)
        if not torch.is_grad_enabled():
            return outputs
        refuse = refuse_gradient(
            "AP921",
            "a backward in evaluation mode",
            "the model's eval() runs without gradients",
            "call model.train() before what is trained, torch.no_grad() around what is not",
        )
        return tree_map_only(Tensor, refuse, outputs)

    def run_whole(self, compute: Callable[[], Any], *, keeps_buffers: bool = True) -> Any:
        """Run ``compute``, code of the model, without gradients; each layer gathers its whole
        weights as it runs. With ``keeps_buffers`` writes to buffers are kept."""
        self._weights.meet(self.tell)
        self._share_buffers()
        self._is_gathered = True
        self.tell("gathering weights and computing the model's own forward")
        try:
            with (
                torch.no_grad(),
                unmoved_modules(self.joined.program.model),
                self._following.own_forward(),
                self._whole.gathered_by_layer(keeps_buffers=keeps_buffers),
            ):
                return compute()
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
            self._is_gathered = False
            self.tell("between steps")

    def run_own(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, keeps_buffers: bool = True
    ) -> Any:
        """Run the model's own forward, without gradients, on arguments cast to the plan's dtype.
        With ``keeps_buffers`` writes to buffers are kept."""
        dtype = COMPUTE_DTYPES[self.joined.plan.model.precision]

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        args, kwargs = tree_map_only(Tensor, cast, (args, dict(kwargs)))
        compute = partial(self._forward, *args, **kwargs)
        return self.run_whole(compute, keeps_buffers=keeps_buffers)

    @contextmanager
    def trained_whole(self) -> Iterator[None]:
        """Put whole weights into the model inside the context; gradients go to this rank's shards.

        Raises UsageError AP146 for a plan with a pipeline: no rank has the weights of all stages.
        """
        plan = self.joined.plan
        if plan.has_pipeline:
            raise UsageError(
                "AP146",
                "a method beside forward is trained under a plan with a pipeline",
                why="no rank has the weights of all stages",
                fix='plan without one: parallel="pp=1"',
            )
        self.keep_buffers()
        with self.as_plain(), self._whole.trained_whole(COMPUTE_DTYPES[plan.model.precision]):
            yield

    @contextmanager
    def unsharded(
        self, model: nn.Module, rank: int | None, device: torch.device | str | None
    ) -> Iterator[None]:
        """Put whole weights into the model inside the context, on all ranks or only on ``rank``."""
        if self.is_plain:
            yield
            return
        self.keep_buffers()
        self._share_buffers()
        wanted = rank is None or rank == self.joined.model.rank
        tensors: dict[str, Tensor] = {}
        for name in self._weights.names:
            value = self._weights.gather((name,), as_computed=False)[name]
            if wanted:
                moved = value.to(device) if device is not None else value
                tensors[name] = moved.clone() if moved is value else moved
        self.is_plain = self._is_unsharded = True
        try:
            with self._whole.all_in_place(tensors):
                yield
                changed = self._changed_in_place()
        finally:
            self.is_plain = self._is_unsharded = False
        if changed:
            raise UsageError(
                "AP926",
                f"{changed[0]} was changed inside unsharded(), and the change is lost",
                why="the unsharded weights are copies; training updates the shards",
                fix="call state = model.state_dict() inside and model.load_state_dict(state) "
                "after it",
            )

    def _changed_in_place(self) -> list[str]:
        """Return the names of whole tensors that the script changed inside ``unsharded``."""
        changed = []
        for name, slots in self._whole.slots.items():
            for module, attribute in slots:
                value = getattr(module, attribute)
                if isinstance(value, Tensor) and not self._weights.is_current(name, value):
                    changed.append(name)
        return changed

    def _share_buffers(self) -> None:
        """Copy the buffers that training leaves alone to the ranks of other stages: there a script
        lacks the counts by which it moves an expert's bias."""
        if self.joined.plan.has_pipeline:
            self._weights.share(
                {name: module.get_buffer(attribute) for name, module, attribute in self._fixed}
            )

    def take_buffers(self) -> None:
        """Copy the buffers that training leaves alone to the program, if the script changed them.

        A script may write to them, assign another tensor, or load a state dict.
        """
        held = {name: module._buffers.get(attribute) for name, module, attribute in self._fixed}
        given = {name: value for name, value in held.items() if value is not None}
        marks = {name: (id(value), value._version) for name, value in given.items()}
        if marks != self._marks:
            self.joined.take_buffers(given)
            self._marks = marks


def _take_over(master: nn.Parameter, old: nn.Parameter) -> None:
    """Copy the hooks and attributes that a script put on parameter ``old`` to ``master``."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None):
            setattr(master, hooks, getattr(old, hooks))
    for name, value in old.__dict__.items():
        master.__dict__.setdefault(name, value)
