"""Deferred initialization: build a model without its weights, and its weights on demand.

``record_build`` returns the model on ``meta`` and a log of the calls that made its tensors;
``materialize`` makes any of them, or boxes of them, and hands each over as soon as it is finished,
so that a rank that keeps only its shards never holds the model. Values are either those of a plain
build from the same seed, bit for bit (``"exact"``), or drawn by position, so that only the
requested numbers are drawn (``"sharded"``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...planner.graph.layout import Region
from .build_log import Log, NeedsValuesError, UnrecordableError
from .exact_replay import draw_all, exact_replay, num_drawn
from .recording import record
from .sharded_replay import full_box, sharded_replay

Init = Literal["auto", "sharded", "exact"]
"""How initial values are drawn: ``exact``, the same values as in an ordinary build; ``sharded``,
from generators seeded by position, so that a rank draws only its shards; ``auto``, ``exact`` up to
``MOST_DRAWN`` random numbers, else ``sharded``."""

MOST_DRAWN = 1_000_000_000
"""Most random numbers of a model for which "auto" means "exact"; drawing them takes some 10 s."""

OnTensor = Callable[[str, Tensor], None]
OnPart = Callable[[str, Region, Tensor], None]


@dataclass(frozen=True)
class Deferred:
    """Model on ``meta``, with all data to compute the initial values of its tensors. ``seed`` is a
    seed, or a state of the CPU generator. ``slots`` maps each name of a parameter or buffer (all
    names of a tied one) to the number of its tensor in ``log``. ``log`` is None if the build could
    not be recorded, for the given ``reason``; ``materialize`` then builds the whole model, once,
    unless ``built`` has its tensors already. ``given`` names tensors for which no random numbers
    are drawn, as their values come from elsewhere."""

    model: nn.Module
    build: Callable[[], nn.Module]
    seed: int | Tensor
    log: Log | None
    slots: dict[str, int]
    reason: str = ""
    init: Init = "exact"
    given: frozenset[str] = frozenset()
    built: dict[str, Tensor] = field(default_factory=dict)

    def without(self, names: Iterable[str]) -> Deferred:
        """Return this deferred model with the tensors ``names`` marked as given: their values come
        from elsewhere (a checkpoint), so none are drawn."""
        return replace(self, given=frozenset(names))

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter or buffer."""
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        tensor: Tensor | None = module._parameters.get(last)
        if tensor is None:
            tensor = module._buffers[last]
        assert tensor is not None
        return tensor.shape

    @property
    def is_recorded(self) -> bool:
        return self.log is not None


def record_build(
    build: Callable[[], nn.Module], seed: int | Tensor = 0, init: Init = "exact"
) -> Deferred:
    """Call the constructor ``build`` of a model without allocating tensors, and record the ops that
    make these. A build that reads values of random tensors, has its own generator or writes tensors
    to a file cannot be recorded: the model is then built on ``meta`` if possible, else with real
    tensors. Values read from files stay in memory once, mapped if possible, while the result
    lives."""
    try:
        with cpu_seed(seed), gc_paused():
            model, log = record(build)
        tensors = _adopted_tensors(model)
        slots = {name: _slot(log, name, tensor) for name, tensor in tensors}
    except Exception as error:  # noqa: BLE001
        model, built = _build_empty(build, seed, isinstance(error, NeedsValuesError))
        return Deferred(model, build, seed, None, {}, _reason(error), init, built=built)
    _to_meta(model)
    if init == "auto":
        init = "exact" if num_drawn(log) <= MOST_DRAWN else "sharded"
    return Deferred(model, build, seed, log, slots, init=init)


def state_after(deferred: Deferred) -> Tensor | None:
    """Return the state that torch's CPU generator has after an ordinary (not deferred) build of the
    model; None if unknown."""
    if deferred.log is None:
        return None
    with cpu_seed(deferred.seed), torch.no_grad():
        draw_all(deferred.log)
        return torch.random.get_rng_state()


def plain_build(build: Callable[[], nn.Module], seed: int | Tensor) -> nn.Module:
    """Build the model on the CPU, with torch's generator seeded by ``seed``."""
    with cpu_seed(seed):
        model = build()
    adopt_tensors(model)
    return model


def materialize(
    deferred: Deferred,
    names: Iterable[str],
    on_tensor: OnTensor,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Compute the tensors ``names`` of a model built without values; call ``on_tensor(name,
    tensor)`` once each is finished, in any order. ``tensor`` is on the CPU, without gradient, and
    cast to ``dtype`` if that is given and it is floating. Memory holds only unfinished tensors and
    any that the caller keeps."""

    def give(name: str, box: Region, tensor: Tensor) -> None:
        target = dtype if tensor.is_floating_point() else None
        on_tensor(name, compact(tensor).to(dtype=target))

    materialize_boxes(deferred, {name: [full_box(deferred.shape(name))] for name in names}, give)


def materialize_boxes(
    deferred: Deferred,
    boxes: Mapping[str, Iterable[Region]],
    on_part: OnPart,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Compute ``boxes`` (ranges of indices per dimension) of tensors by one replay of the recorded
    build; call ``on_part(name, box, tensor)`` once each is finished. ``tensor`` is a CPU tensor of
    the box's shape to copy from, possibly a view. ``tick`` is called regularly meanwhile."""
    boxes = {name: tuple(dict.fromkeys(each)) for name, each in boxes.items()}
    if not any(boxes.values()):
        return

    def cut(name: str, tensor: Tensor) -> None:
        for box in boxes[name]:
            on_part(name, box, tensor.detach()[tuple(slice(*bounds) for bounds in box)])

    log = deferred.log
    if log is None:
        if not deferred.built:
            model = plain_build(deferred.build, deferred.seed)
            deferred.built.update(_adopted_tensors(model))
        for name in boxes:
            tick()
            cut(name, deferred.built[name])
        return
    slots = deferred.slots
    with cpu_seed(deferred.seed), torch.no_grad():
        if deferred.init == "exact":
            exact_replay(log, {name: slots[name] for name in boxes}, cut, tick)
        else:
            parts = {(name, box): slots[name] for name, each in boxes.items() for box in each}
            sharded_replay(log, parts, on_part, tick)


@contextmanager
def cpu_seed(seed: int | Tensor) -> Iterator[None]:
    """Seed torch's CPU generator (or set its state) for a ``with`` block, and restore it after."""
    with torch.random.fork_rng(devices=[]):
        if isinstance(seed, Tensor):
            torch.random.set_rng_state(seed)
        else:
            torch.random.manual_seed(seed)
        yield


def adopt_tensors(model: nn.Module) -> None:
    """Register plain tensor attributes of modules as buffers, so that every tensor has a name.
    These buffers are not part of the state dict."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                del module.__dict__[name]
                module.register_buffer(name, value, persistent=False)


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the (name, tensor) of a model's parameters, then of its buffers; a tied tensor under
    each of its names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _adopted_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    adopt_tensors(model)
    return named_tensors(model)


def _slot(log: Log, name: str, tensor: Tensor) -> int:
    """Return the number in the log of the model's ``tensor`` called ``name``; a real tensor is
    added as a constant. Raises UnrecordableError for a tensor on ``meta``."""
    if isinstance(tensor, FakeTensor):
        return log.slot(tensor)
    if tensor.is_meta:
        raise UnrecordableError(f"{name} is on meta")
    return log.add_constant(tensor)


def _to_meta(model: nn.Module) -> None:
    """Replace a model's fake tensors by ``meta`` tensors; tied tensors stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _meta(parameter, made)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _meta(buffer, made)


def _meta(tensor: Tensor, made: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in made:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
        made[id(tensor)] = meta
    return made[id(tensor)]


def _build_empty(
    build: Callable[[], nn.Module], seed: int | Tensor, needs_values: bool
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model that cannot be recorded: on ``meta`` or, if its build needs values, with real
    tensors, which are then taken out. Return the model on ``meta`` and these tensors by name."""
    try:
        if needs_values:
            raise NotImplementedError
        with cpu_seed(seed), torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError):
        model = plain_build(build, seed)
    named = dict(_adopted_tensors(model))
    is_real = not any(tensor.is_meta for tensor in named.values())
    _to_meta(model)
    return model, named if is_real else {}


def compact(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage holds only its own elements: itself or a copy."""
    full = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor if full else tensor.clone()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Suspend the garbage collector within a ``with`` block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
