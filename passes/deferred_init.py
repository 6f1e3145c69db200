"""Deferred initialization: build a model without its weights, and its weights when wanted.

``record_build`` gives the model on ``meta`` and a log of how its tensors came to be;
``materialize`` makes any of them, bit for bit as a plain build from the same seed would,
and hands each over as soon as it is finished, so that a rank that keeps only its shards
never holds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .recording import Log, UnrecordableError, record
from .uncollected import uncollected

OnTensor = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Deferred:
    """A model on ``meta`` and how to make its tensors.

    ``seed`` is a seed, or a state of the CPU generator. ``slots`` maps each parameter and
    buffer name (tied ones all) to its tensor in ``log``. ``log`` is None where the build
    could not be recorded; ``materialize`` then builds the whole model. ``reason`` says why.
    """

    model: nn.Module
    build: Callable[[], nn.Module]
    seed: int | Tensor
    log: Log | None
    slots: dict[str, int]
    reason: str = ""

    @property
    def is_recorded(self) -> bool:
        return self.log is not None


def record_build(build: Callable[[], nn.Module], seed: int | Tensor = 0) -> Deferred:
    """Build a model without allocating it.

    ``build`` must not read values of random tensors, seed a generator or use one of its
    own; where it does, the model is built on ``meta`` if it can be, else really.
    """
    try:
        with seeded(seed), uncollected():
            model, log = record(build)
        tensors = _named_tensors(model)
        slots = {name: log.slot(tensor) for name, tensor in tensors}
        _check_untouched(tensors)
    except Exception as error:  # noqa: BLE001
        return Deferred(_build_on_meta(build, seed), build, seed, None, {}, reason=_reason(error))
    _to_meta(model)
    return Deferred(model, build, seed, log, slots)


def plain_build(build: Callable[[], nn.Module], seed: int | Tensor) -> nn.Module:
    """The model as ``build`` makes it on the CPU, from ``seed``."""
    with seeded(seed):
        model = build()
    adopt_tensors(model)
    return model


def materialize(
    deferred: Deferred,
    names: Iterable[str],
    on_tensor: OnTensor,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Hand over the tensors ``names``, each as soon as it is finished.

    ``on_tensor(name, tensor)`` gets a tensor without gradient on ``device``, floating ones
    cast to ``dtype`` if given. It may be called in any order; memory in between is what the
    caller keeps and the tensors in the making.
    """
    wanted = list(names)

    def give(name: str, tensor: Tensor) -> None:
        target = dtype if tensor.is_floating_point() else None
        on_tensor(name, _compact(tensor.detach()).to(device=device, dtype=target))

    if deferred.log is None:
        tensors = dict(_named_tensors(plain_build(deferred.build, deferred.seed)))
        for name in wanted:
            give(name, tensors[name])
        return
    with seeded(deferred.seed), torch.no_grad():
        deferred.log.replay({name: deferred.slots[name] for name in wanted}, give)


@contextmanager
def seeded(seed: int | Tensor) -> Iterator[None]:
    """Seed torch's CPU generator inside (or set its state), and restore it after."""
    with torch.random.fork_rng(devices=[]):
        if isinstance(seed, Tensor):
            torch.random.set_rng_state(seed)
        else:
            torch.random.manual_seed(seed)
        yield


def adopt_tensors(model: nn.Module) -> None:
    """Make plain tensor attributes of modules buffers, so that every tensor has a name.

    They stay out of the state dict.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                del module.__dict__[name]
                module.register_buffer(name, value, persistent=False)


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    adopt_tensors(model)
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _check_untouched(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise where a tensor was changed behind the log's back, by ``tensor.data = …``."""
    for name, tensor in tensors:
        if not isinstance(tensor, FakeTensor):
            raise UnrecordableError(f"{name} was not made by a torch op")


def _to_meta(model: nn.Module) -> None:
    """Replace fake tensors by meta tensors; ties stay ties."""
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


def _build_on_meta(build: Callable[[], nn.Module], seed: int | Tensor) -> nn.Module:
    """What cannot be recorded: built under ``torch.device("meta")``, or really and emptied."""
    try:
        with seeded(seed), torch.device("meta"):
            model = build()
    except (RuntimeError, NotImplementedError):
        model = plain_build(build, seed)
    adopt_tensors(model)
    _to_meta(model)
    return model


def _compact(tensor: Tensor) -> Tensor:
    """A tensor that holds no more memory than it shows."""
    full = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor if full else tensor.clone()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
