"""Opaque leaves: calls whose inside is not captured.

In: a function and its arguments, while a model is exported. Out: one node, an op of
``torch.library`` from the call's tensors to its results. Such an op has no rule and runs whole on
every rank, by calling the function itself.

Two kinds of calls are opaque. An ``autograd.Function``: its forward would be traced, but its
backward would be lost silently. And a submodule that cannot be exported (control flow or shapes
inside it depend on values): its parameters are inputs of the op, so they are placed and trained
like others; shapes come from an example run. A parameter that a step does not use gets a gradient
of zeros.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...planner.errors import CaptureError
from ...planner.graph.graph import OpRule
from ..ops.torch_ops import forget

NAMESPACE = "autoparallel_opaque"

ANNOTATION = "__autoparallel_annotation__"
"""Attribute of a module class in which ``register_op`` stores the annotation of its sharding."""


def opaque_call(
    name: str,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    example: bool,
    made: dict[str, Any],
) -> tuple[Any, str]:
    """Call ``function`` as a single op named after ``name``; return the result and the op's path.
    ``made`` holds the ops of this capture, which equal calls share. ``example``: output shapes come
    from a real execution on random values, else from fake tensors. Raises ValueError if shapes
    depend on values."""
    flat, structure = tree_flatten((args, dict(kwargs)))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    runner = _Runner(function, structure, flat)
    result, kept = _made(runner, tensors, example=example)
    shapes = [value for value in result if isinstance(value, Tensor)]
    unique = _unique(name, function, flat)
    if unique not in made:
        made[unique] = _make_op(unique, runner, shapes)
    feed = iter(made[unique](tensors))
    outputs = [next(feed) if isinstance(value, Tensor) else value for value in result]
    return tree_unflatten(outputs, kept), f"{NAMESPACE}.{unique}.default"


def _made(runner: _Runner, tensors: Sequence[Tensor], *, example: bool) -> tuple[list[Any], Any]:
    """Call the function outside of all tracing modes; return the leaves of its result, and the
    result's pytree structure. With ``example`` it is executed on two sets of values, for which
    shapes must agree."""
    found: list[Any] = []

    def work() -> None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                if not example:
                    with FakeTensorMode():
                        fakes = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
                        found.append(runner.whole(fakes))
                    return
                for _ in range(2):
                    given = [_random(shape, dtype) for shape, dtype in specs]
                    versions = [each._version for each in given]
                    found.append(runner.whole(given))
                    if versions != [each._version for each in given]:
                        raise _writing(runner.function)
        except Exception as error:  # noqa: BLE001 - raised again below
            found.append(error)

    specs = [(tuple(map(int, tensor.shape)), tensor.dtype) for tensor in tensors]
    with unset_fake_temporarily():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if isinstance(found[-1], Exception):
        raise found[-1]
    shapes = [[tuple(v.shape) for v in flat if isinstance(v, Tensor)] for flat, _ in found]
    if shapes[0] != shapes[-1]:
        raise ValueError(f"shapes depend on values: {shapes[0]} and {shapes[-1]}")
    flat, structure = found[0]
    return flat, structure


def _writing(function: Any) -> CaptureError:
    name = type(getattr(function, "module", function)).__name__
    return CaptureError(
        "AP216",
        f"a {name} writes to its buffers or arguments, and its values decide what it computes",
        why="it is kept whole as one op, whose writes would be lost",
        fix="write its forward without `.item()`, `float()` and `if` of tensors; of a batch norm "
        "with momentum=None, give it a momentum",
    )


class _Runner:
    """Recorded call of a function, which can be executed again on other tensors."""

    def __init__(self, function: Callable[..., Any], structure: Any, flat: list[Any]) -> None:
        self.is_tensor = [isinstance(value, Tensor) for value in flat]
        self.literals = [None if isinstance(value, Tensor) else value for value in flat]
        self.function, self.structure = function, structure

    def whole(self, tensors: Sequence[Tensor]) -> tuple[list[Any], Any]:
        """Call the function on ``tensors``; return the leaves of its result, and its pytree
        structure."""
        feed = iter(tensors)
        flat = [
            next(feed) if is_tensor else value
            for value, is_tensor in zip(self.literals, self.is_tensor, strict=True)
        ]
        args, kwargs = tree_unflatten(flat, self.structure)
        return tree_flatten(self.function(*args, **kwargs))

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        outputs, _ = self.whole(tensors)
        return [value for value in outputs if isinstance(value, Tensor)]


def _fresh(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    return [
        value.clone(memory_format=torch.contiguous_format)
        if value.untyped_storage()._cdata in own
        else value.contiguous()
        for value in outputs
    ]


def _make_op(name: str, runner: _Runner, shapes: Sequence[Tensor]) -> Any:
    """Register an op ``Tensor[] -> Tensor[]`` that calls ``runner``, with its backward. ``shapes``:
    tensors of the shapes of its outputs."""

    def forward(tensors: list[Tensor]) -> list[Tensor]:
        return _fresh(runner(tensors), tensors)

    def fake(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].new_empty(each.shape, dtype=each.dtype) for each in shapes]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (tensors,) = inputs
        ctx.wants = [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        held = [
            tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(ctx.saved_tensors, ctx.wants, strict=True)
        ]
        with torch.enable_grad():
            outputs = runner(held)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        wanted = [tensor for tensor in held if tensor.requires_grad]
        made = torch.autograd.grad(
            [o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True
        )
        found = iter(made)
        # A parameter that this step did not use has a zero gradient, not none: its collectives must
        # run on every rank, whatever its own values are.
        gradients = iter(
            torch.zeros_like(tensor) if gradient is None else gradient
            for gradient, tensor in zip(found, wanted, strict=True)
        )
        return [next(gradients) if tensor.requires_grad else None for tensor in held]

    op = torch.library.custom_op(
        f"{NAMESPACE}::{name}", forward, mutates_args=(), schema="(Tensor[] tensors) -> Tensor[]"
    )
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=keep)
    forget()
    return op


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def _unique(name: str, function: Callable[..., Any], arguments: list[Any]) -> str:
    """Return a unique name for an op, made from ``name``, its function and its arguments; it is
    equal in all processes and precisions."""
    facts = [name, function.__module__, *_settings(getattr(function, "module", None))]
    facts += [
        f"{tuple(value.shape)} {_number(value)}" if isinstance(value, Tensor) else str(value)[:200]
        for value in arguments
    ]
    digest = hashlib.sha256("|".join(facts).encode()).hexdigest()[:8]
    plain = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    return f"{plain}_{digest}"


def _number(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype, with one name for all floating dtypes, so that an op has
    the same name in plans of any precision."""
    return "float" if tensor.is_floating_point() else str(tensor.dtype)


def _settings(module: nn.Module | None) -> list[str]:
    """Return texts that tell a module apart from others of its class: its submodules and plain
    attributes."""
    if module is None:
        return []
    return [
        f"{path} {type(part).__qualname__} {key} {value!r}"
        for path, part in module.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, bool | int | float | str | tuple | None) and key != "training"
    ]


class _ModuleCall:
    """Callable that computes a submodule's forward from its parameters, buffers and arguments."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module.forward

    def __call__(self, states: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        replaced, self.module.forward = self.module.forward, self.forward
        try:
            return functional_call(self.module, states, args, kwargs)
        finally:
            self.module.forward = replaced


@contextmanager
def opaque_modules(modules: Mapping[str, nn.Module], rules: dict[str, OpRule]) -> Iterator[None]:
    """Make each call of ``modules`` (by path) a single op within a ``with`` block. Sharding rules
    of modules whose class the user has annotated are added to ``rules``."""
    made: dict[str, Any] = {}
    for module in modules.values():
        module.forward = _as_op(module, rules, made)
    try:
        yield
    finally:
        for module in modules.values():
            del module.__dict__["forward"]


def annotated_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by path, the submodules whose class the user has annotated with a sharding rule."""
    return {path: m for path, m in model.named_modules() if hasattr(type(m), ANNOTATION)}


def _as_op(module: nn.Module, rules: dict[str, OpRule], made: dict[str, Any]) -> Callable[..., Any]:
    call, name = _ModuleCall(module), type(module).__name__

    def forward(*args: Any, **kwargs: Any) -> Any:
        states = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        result, op = opaque_call(name, call, (states, *args), kwargs, example=True, made=made)
        annotation = getattr(type(module), ANNOTATION, None)
        if annotation is not None:
            whole = [" ".join("_" * state.dim()) for state in states.values()]
            rules[op] = OpRule(", ".join([*whole, annotation]))
        return result

    return forward


@contextmanager
def whole_functions() -> Iterator[None]:
    """Make each call of an ``autograd.Function`` a single op with its own backward within a
    ``with`` block."""
    original = torch.autograd.Function.__dict__["apply"]
    made: dict[str, Any] = {}

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        bound = original.__get__(None, cls)
        if cls.__module__.startswith("torch.") or not any(t.requires_grad for t in tensors):
            return bound(*args, **kwargs)

        def function(*args: Any, **kwargs: Any) -> Any:
            return bound(*args, **kwargs)

        result, _ = opaque_call(cls.__qualname__, function, args, kwargs, example=False, made=made)
        return result

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
