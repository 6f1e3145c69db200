"""The model's forward and loss as an ``ExportedProgram``, without weights.

In: a model on ``meta`` and an example batch. Out: the result of ``torch.export`` for
``loss(model(batch))``, without writes in place. Meanwhile the model's parameters are fake tensors
on the CPU, so code that asks for a device takes the same path as in training.
"""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ...planner.errors import CaptureError
from ...planner.graph.graph import OpRule
from ..initialization.deferred_init import named_tensors
from ..programs.batch import Example, InputPlace
from ..programs.outputs import OutputForm, output_form, scalar_losses
from ..programs.program import Dtype
from ..tracing.call_trace import traced_if_wanted
from ..tracing.counter_random import counter_random
from ..tracing.hf_experts import capturable_experts
from ..tracing.inner_gradients import InnerGradientError, inner_gradients, watched_gradients
from ..tracing.leaves import LeafError, widen
from ..tracing.locate import capture_error, noting_user_frames
from ..tracing.modes import (
    explicit_ops,
    inference_without_gradients,
    promote_to_float64,
    unchecked_distributions,
    undetected_causal_masks,
    unmoved_modules,
)
from ..tracing.opaque import annotated_modules, opaque_modules, whole_functions
from .functionalize import functionalize
from .repeat_calls import Repeats

PREFIX = "captured"
FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")

LossFn = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Exported:
    """Result of ``torch.export`` for a model and an example batch. ``rules`` are the user's
    sharding rules of submodules that were exported as single ops. ``outputs`` is the structure of
    the model's outputs."""

    program: ExportedProgram
    example: Example
    rules: Mapping[str, OpRule] = field(default_factory=dict)
    outputs: OutputForm | None = None

    @property
    def inputs(self) -> Mapping[str, InputPlace]:
        """Location in the batch of each input of the program, by the input's name."""
        return self.example.inputs


class _Noted:
    """Record of the structure of the model's outputs in a trace. It is not an attribute of the
    traced module, because ``torch.export`` undoes changes to the module."""

    outputs: OutputForm | None = None


class _WithLoss(nn.Module):
    """Module that takes the batch's tensors as arguments and computes ``loss(model(batch))``."""

    def __init__(self, model: nn.Module, example: Example, loss_fn: LossFn | None) -> None:
        super().__init__()
        self.add_module(PREFIX, model)
        self.training = model.training
        self.noted = _Noted()
        self._example = example
        self.takes_gradients = False
        self._loss_fn = loss_fn

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = self._example.with_tensors(tensors)
        if torch.compiler.is_dynamo_compiling():
            return self._loss(batch)
        gradients = inner_gradients() if self.takes_gradients else watched_gradients()
        with counter_random(), traced_if_wanted(), gradients:
            return self._loss(batch)

    def _loss(self, batch: Any) -> Tensor:
        """Compute the loss by a forward, and record the structure of the model's outputs."""
        model = self.get_submodule(PREFIX)
        held = _buffers(model)
        outputs = call_model(model, batch)
        if not torch.compiler.is_dynamo_compiling():
            _write_assigned(held)
        loss = find_loss(outputs, batch, self._loss_fn)
        if not torch.compiler.is_dynamo_compiling():
            own = None if self._loss_fn is not None else _loss_of(outputs)
            self.noted.outputs = output_form(outputs, own)
        return loss


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, tensor)
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _write_assigned(held: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Write each value that a forward has assigned to a buffer's attribute into the buffer itself:
    ``torch.export`` does not record the assignment. Raises CaptureError AP208 if a buffer changes
    its shape."""
    for module, name, tensor in held:
        value = module._buffers.get(name)
        if value is tensor or value is None:
            continue
        if value.shape != tensor.shape:
            raise CaptureError(
                "AP208",
                f"the forward changes the shape of buffer {name} of a {type(module).__name__}",
                why=f"it was {tuple(tensor.shape)} and becomes {tuple(value.shape)}",
                fix="register the buffer with its final shape",
            )
        with torch.no_grad():
            tensor.copy_(value)
        module._buffers[name] = tensor


class _WithMarks(_WithLoss):
    """Module that computes the loss and also returns the results of the ops that mark where equal
    layers begin and end, so that these ops stay in the exported graph."""

    def __init__(
        self, model: nn.Module, example: Example, loss_fn: LossFn | None, repeats: Repeats
    ) -> None:
        super().__init__(model, example, loss_fn)
        self._repeats = repeats

    def forward(self, *tensors: Tensor) -> Any:
        batch = self._example.with_tensors(tensors)
        with counter_random() as draws, traced_if_wanted(), watched_gradients():
            self._repeats.start(draws)
            return self._loss(batch), *self._repeats.marks


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: the items of a tuple by position, of a dict by name. Of a dict,
    ``forward`` gets the entries that it has parameters for; the other entries are for the loss."""
    if isinstance(batch, Tensor):
        return model(batch)
    if not isinstance(batch, Mapping):
        return model(*batch)
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return model(**batch)
    taken = {parameter.name for parameter in parameters}
    return model(**{name: value for name, value in batch.items() if name in taken})


def find_loss(outputs: Any, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """Return the scalar that training minimizes: ``loss_fn(outputs, batch)`` or, without
    ``loss_fn``, the model's output itself, its ``loss``, or the only differentiable scalar in a
    tuple such as ``(logits, loss)``."""
    loss: Any = _loss_of(outputs) if loss_fn is None else loss_fn(outputs, batch)
    if not isinstance(loss, Tensor):
        raise CaptureError(
            "AP203",
            "the model returns no loss",
            why=f"its output is a {type(outputs).__name__} with no scalar tensor `loss` in it",
            fix="add `loss_fn(outputs, batch)` to the model file, or return the loss",
        )
    if loss.numel() != 1:
        raise CaptureError(
            "AP204",
            f"the loss has shape {tuple(loss.shape)} and is not a scalar",
            why="training needs a scalar to call backward on",
            fix="reduce it (`.mean()`) in the model or in `loss_fn(outputs, batch)`",
        )
    return loss.reshape(()) if loss.dim() else loss


def _loss_of(outputs: Any) -> Any:
    """Return the candidate for the loss among a model's outputs: the output itself, its ``loss``,
    or the only scalar in a tuple; None if there is none."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, tuple | list):
        scalars = scalar_losses(outputs)
        return scalars[0] if len(scalars) == 1 else None
    return loss


def export_loss(
    model: nn.Module, example: Example, *, loss_fn: LossFn | None, dtype: Dtype
) -> Exported:
    """Export ``loss(model(batch))`` by the first method of ``torch.export`` that succeeds. The
    methods are: non-strict; strict; with each submodule that cannot be exported replaced by a
    single op. Raises ``CaptureError`` with the error of the first method if all fail."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    target = getattr(torch, dtype)
    with fake_parameters(model, mode, dtype=target), capturable_experts():
        wrapped = _WithLoss(model, example, loss_fn)
        tensors = tuple(_fake(each, mode, target) for each in example.tensors())
        leaves, rules = annotated_modules(model), dict[str, OpRule]()
        try:
            with opaque_modules(leaves, rules):
                program = _export(wrapped, tensors, strict=False, dtype=dtype)
        except CaptureError:
            raise
        except InnerGradientError:
            wrapped.takes_gradients = True
            program = _export_gradients(wrapped, tensors, dtype)
        except Exception as error:  # noqa: BLE001
            program = _climb(wrapped, tensors, dtype, error, rules)
    return Exported(program, example, rules, wrapped.noted.outputs)


def _export_gradients(
    wrapped: nn.Module, tensors: tuple[Tensor, ...], dtype: Dtype
) -> ExportedProgram:
    """Export a model whose forward itself computes gradients (with ``torch.autograd.grad``, …)."""
    try:
        return _export(wrapped, tensors, strict=False, dtype=dtype)
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(error, wrapped, PREFIX) from error


def export_repeats(
    model: nn.Module, example: Example, repeats: Repeats, *, loss_fn: LossFn | None, dtype: Dtype
) -> Exported:
    """Export as ``export_loss`` does, but capture only a few of equal layers, and replace the
    others by single ops. Any error is raised as it is; the caller then tries ``export_loss``, whose
    errors are written for the user."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    target = getattr(torch, dtype)
    with repeats.active(), fake_parameters(model, mode, dtype=target), capturable_experts():
        wrapped = _WithMarks(model, example, loss_fn, repeats)
        tensors = tuple(_fake(each, mode, target) for each in example.tensors())
        rules: dict[str, OpRule] = {}
        with opaque_modules(annotated_modules(model), rules):
            program = _export(wrapped, tensors, strict=False, dtype=dtype)
    return Exported(program, example, rules, wrapped.noted.outputs)


def trace_loss(
    model: nn.Module, example: Example, *, loss_fn: LossFn | None, dtype: Dtype
) -> OutputForm | None:
    """Compute ``loss(model(batch))`` on fake tensors in the same torch modes as an export, without
    building a graph. Return the structure of the model's outputs."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    target = getattr(torch, dtype)
    with fake_parameters(model, mode, dtype=target), capturable_experts():
        wrapped = _WithLoss(model, example, loss_fn)
        wrapped.takes_gradients = True
        tensors = tuple(_fake(each, mode, target) for each in example.tensors())
        with _modes(strict=False, dtype=dtype), _exporting(), mode:
            wrapped(*tensors)
    return wrapped.noted.outputs


@contextmanager
def _exporting() -> Iterator[None]:
    """Make ``torch.compiler`` report within a ``with`` block that an export is in progress."""
    flags: Any = torch.compiler
    names = ("_is_exporting_flag", "_is_compiling_flag")
    before = [getattr(flags, name) for name in names]
    try:
        for name in names:
            setattr(flags, name, True)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(flags, name, value)


def _climb(
    wrapped: nn.Module,
    tensors: tuple[Tensor, ...],
    dtype: Dtype,
    first: Exception,
    rules: dict[str, OpRule],
) -> ExportedProgram:
    """Export by the methods of ``export_loss`` after the first (strict; submodules as single ops).
    If all fail, raise ``first``, the error of the first method. ``rules``: sharding rules, by op,
    of these submodules are added to it."""
    located = capture_error(first, wrapped, PREFIX)
    model = wrapped.get_submodule(PREFIX)
    leaves, error = annotated_modules(model), first
    if located.code != "AP202" and not leaves:
        try:
            return _export(wrapped, tensors, strict=True, dtype=dtype)
        except Exception:  # noqa: BLE001
            pass  # failed, too: the next method tells which submodules cannot be kept whole
    while True:
        try:
            leaves = widen(model, leaves, error)
            with opaque_modules(leaves, rules):
                return _export(wrapped, tensors, strict=False, dtype=dtype)
        except LeafError:
            raise located from first
        except CaptureError:
            raise
        except Exception as again:  # noqa: BLE001
            error = again


def _export(
    wrapped: nn.Module, tensors: tuple[Tensor, ...], *, strict: bool, dtype: Dtype
) -> ExportedProgram:
    # Graphs become code only where they run. torch.export prints its half-made graph to stderr
    # before it raises, and logs the error.
    with (
        _modes(strict=strict, dtype=dtype),
        redirect_stderr(io.StringIO()),
        noting_user_frames(),
        _use_lazy_graph_module(True),
    ):
        level = FAKE_TENSOR_LOG.level
        FAKE_TENSOR_LOG.setLevel(logging.CRITICAL)
        try:
            return functionalize(torch.export.export(wrapped, tensors, strict=strict))
        finally:
            FAKE_TENSOR_LOG.setLevel(level)


@contextmanager
def _modes(*, strict: bool, dtype: Dtype) -> Iterator[None]:
    """Enter all torch modes that a forward needs during capture, for a ``with`` block."""
    with ExitStack() as modes:
        modes.enter_context(undetected_causal_masks())
        modes.enter_context(unchecked_distributions())
        modes.enter_context(unmoved_modules())
        if not strict:
            modes.enter_context(inference_without_gradients())
            modes.enter_context(explicit_ops())
            modes.enter_context(whole_functions())
        if dtype == "float64":
            modes.enter_context(promote_to_float64())
        yield


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers to ``meta``; return them by name. A tied tensor is
    returned under each of its names, as one copy."""
    made: dict[int, Tensor] = {}
    named = named_tensors(model)
    for _, tensor in named:
        if id(tensor) in made:
            continue
        is_sparse = tensor.layout != torch.strided
        empty = tensor.detach() if is_sparse else tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        made[id(tensor)] = empty
    return {name: made[id(tensor)] for name, tensor in named}


@contextmanager
def with_held(model: nn.Module, held: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the model's parameters and buffers by the tensors ``held``, by name, within a
    ``with`` block."""
    saved: list[tuple[Any, str, Tensor | None]] = []
    for name, tensor in held.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        slots: Any = module._parameters if attribute in module._parameters else module._buffers
        saved.append((slots, attribute, slots.get(attribute)))
        slots[attribute] = tensor
    try:
        yield
    finally:
        for slots, attribute, before in reversed(saved):
            slots[attribute] = before


@contextmanager
def fake_parameters(
    model: nn.Module, mode: FakeTensorMode, *, dtype: torch.dtype
) -> Iterator[None]:
    """Replace the model's parameters and buffers by fake CPU tensors of ``dtype`` within a ``with``
    block. Floating parameters are cast; floating buffers keep their dtype in mixed precision and
    are cast with the rest in float64. Tied tensors stay tied. Sparse buffers are not replaced."""
    made: dict[int, Tensor] = {}
    saved: list[tuple[Any, str, Tensor]] = []
    buffer_dtype = dtype if dtype == torch.float64 else None
    try:
        for module in model.modules():
            slots: Any
            for slots, target in ((module._parameters, dtype), (module._buffers, buffer_dtype)):
                for name, tensor in slots.items():
                    if tensor is None or tensor.layout != torch.strided:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor, mode, target)
                    saved.append((slots, name, tensor))
        for slots, name, tensor in saved:
            slots[name] = made[id(tensor)]
        yield
    finally:
        for slots, name, tensor in saved:
            slots[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode, dtype: torch.dtype | None) -> Tensor:
    meta = tensor.detach().to("meta")
    if dtype is not None and meta.is_floating_point():
        meta = meta.to(dtype)
    elif dtype is not None and meta.is_complex():
        meta = meta.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    fake = FakeTensor(mode, meta, torch.device("cpu"))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)
