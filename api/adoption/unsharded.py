"""Contexts that put whole weights into the modules of a parallel model.

In: a model whose parameters are this rank's shards, and ``runtime.step.whole_weights``, which
gathers them. Out: contexts inside which the model's own code runs: with all weights in place
(``all_in_place``), or with each repeated layer's weights gathered when the layer is called and
freed after it (``gathered_by_layer``), as in fully sharded data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.runtime.parameters.global_values import whole
from autoparallel.runtime.step.whole_weights import WholeWeights

Slot = tuple[nn.Module, str]
"""Place of a tensor: a module, and the name of its attribute for a parameter or buffer."""


class WholeModule:
    """Contexts, each collective, that put whole tensors in place of a model's shards.

    A slot is the place of a tensor: a module and the name of its parameter or buffer. ``tied`` maps
    each further name of a tied parameter to its first name.
    """

    def __init__(self, model: nn.Module, weights: WholeWeights, tied: Mapping[str, str]) -> None:
        self._weights = weights
        known = set(weights.names)
        self._slots: dict[str, list[Slot]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for attribute in (*module._parameters, *module._buffers):
                name = f"{path}.{attribute}" if path else attribute
                first = tied.get(name, name)
                if first in known:
                    self._slots.setdefault(first, []).append((module, attribute))
        self._name_of = {slot: name for name, slots in self._slots.items() for slot in slots}
        self._layers, self._around = self._split_names(model)

    @property
    def slots(self) -> Mapping[str, list[Slot]]:
        """Slots of each tensor whose values are distributed over ranks, by the tensor's name."""
        return self._slots

    def _split_names(self, model: nn.Module) -> tuple[dict[nn.Module, list[str]], list[str]]:
        """Return the tensor names of each repeated layer, by its module, and all other names."""
        layer_of = {module: layer for layer in _layers(model) for module in layer.modules()}
        layers: dict[nn.Module, list[str]] = {}
        around: list[str] = []
        for name in self._weights.names:
            holders = {layer_of.get(module) for module, _ in self._slots.get(name, ())}
            layer = holders.pop() if len(holders) == 1 else None
            if layer is not None:
                layers.setdefault(layer, []).append(name)
            elif name in self._slots:
                around.append(name)
        return layers, around

    @contextmanager
    def all_in_place(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Put ``tensors`` into the model inside the context, and None into all other slots."""
        held = self._put(self._slots, tensors)
        try:
            yield
        finally:
            _restore(held)

    @contextmanager
    def gathered_by_layer(self, *, keeps_buffers: bool) -> Iterator[None]:
        """Gather each layer's whole weights for its forward inside the context.

        Buffers are copies; with ``keeps_buffers`` the writes of a forward to them are kept.
        """
        gathered: dict[nn.Module, list[tuple[Slot, Any]]] = {}

        def before(names: list[str], layer: nn.Module, _: Any) -> None:
            if layer not in gathered:  # a layer that calls itself holds its weights already
                gathered[layer] = self._put(names, self._gather(names))

        def end(held: list[tuple[Slot, Any]]) -> None:
            if keeps_buffers:
                self._keep_buffers(held)
            _restore(held)

        def after(layer: nn.Module, _: Any, __: Any) -> None:
            end(gathered.pop(layer, []))

        handles: list[Any] = []
        elsewhere = self._put_stand_ins()
        held = self._put(self._around, self._gather(self._around))
        try:
            for layer, names in self._layers.items():
                handles.append(layer.register_forward_pre_hook(partial(before, names)))
                handles.append(layer.register_forward_hook(after, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for each in gathered.values():
                end(each)
            end(held)
            _restore(elsewhere)

    def _put_stand_ins(self) -> list[tuple[Slot, Tensor | None]]:
        """Put placeholders without memory into slots of tensors that only other ranks hold; return
        the changed slots, each with its former value None."""
        held: list[tuple[Slot, Tensor | None]] = []
        for name in (name for names in self._layers.values() for name in names):
            if self._weights.is_elsewhere(name):
                stand_in = self._weights.stand_in(name)
                for module, attribute in self._slots[name]:
                    slots: Any = module._parameters
                    slots = slots if attribute in slots else module._buffers
                    if slots[attribute] is None:  # else the rank has a replica
                        held.append(((module, attribute), None))
                        slots[attribute] = stand_in
        return held

    @contextmanager
    def trained_whole(self, dtype: torch.dtype) -> Iterator[None]:
        """Put whole weights in ``dtype`` into the model inside the context.

        Their gradients go to the shards, and writes to buffers are kept.
        """
        buffers = [name for name in self._slots if self._is_buffer(name)]
        held = self._put(buffers, self._gather(buffers))
        masters = []
        try:
            for name, slots in self._slots.items():
                if not self._is_buffer(name):
                    masters += [(m, attribute, m._parameters[attribute]) for m, attribute in slots]
            made = {id(master): _gather_whole(master, dtype) for _, _, master in masters}
            for module, attribute, master in masters:
                _compute_with(module, attribute, made[id(master)])
            yield
        finally:
            for module, attribute, master in masters:
                _compute_with(module, attribute, master)
            self._keep_buffers(held)
            _restore(held)

    def _keep_buffers(self, held: Sequence[tuple[Slot, Any]]) -> None:
        """Store the values that a forward has written to whole buffers in this rank's buffers.
        ``held`` are the slots of the buffers, with the tensors before the forward."""
        for (module, attribute), old in held:
            value = module._buffers.get(attribute)
            if value is not None and value is not old:
                self._weights.put(self._name_of[module, attribute], value)

    def _gather(self, names: Iterable[str]) -> dict[str, Tensor]:
        found = self._weights.gather(names, as_computed=True)
        return {
            name: value.clone() if self._is_buffer(name) else value for name, value in found.items()
        }

    def _is_buffer(self, name: str) -> bool:
        module, attribute = self._slots[name][0]
        return attribute in module._buffers

    def _put(
        self, names: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> list[tuple[Slot, Tensor | None]]:
        """Put tensors into the slots of ``names``; return the slots with the tensors before."""
        before: list[tuple[Slot, Tensor | None]] = []
        for name in names:
            value = tensors.get(name)
            for module, attribute in self._slots[name]:
                is_parameter = attribute in module._parameters
                old: Any = (module._parameters if is_parameter else module._buffers)[attribute]
                before.append(((module, attribute), old))
                if is_parameter and value is not None and not isinstance(value, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=False)
                # ``setattr``: modules such as nn.LSTM keep lists of their parameters up to date.
                setattr(module, attribute, value)
        return before


def _restore(held: Sequence[tuple[Slot, Tensor | None]]) -> None:
    """Put tensors ``held`` before back into their slots, in reverse, as a slot may occur twice."""
    for (module, attribute), value in reversed(held):
        if attribute in module._parameters and not isinstance(value, nn.Parameter | None):
            _compute_with(module, attribute, value)
        else:
            setattr(module, attribute, value)


def _gather_whole(master: Any, dtype: torch.dtype) -> Tensor:
    """Gather a parameter from the shards of all ranks, in the plan's compute dtype."""
    found = whole(master)
    return found.to(dtype) if found.is_floating_point() else found


def _compute_with(module: nn.Module, name: str, value: Any) -> None:
    """Replace a module's parameter by a tensor that may be no ``nn.Parameter``."""
    module._parameters[name] = value
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
        module._flat_weights[module._flat_weights_names.index(name)] = value


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated layers of a model: outermost modules in ModuleLists and the like."""
    lists = nn.ModuleList | nn.ModuleDict
    for child in model.children():
        if isinstance(child, lists | nn.Sequential):
            for layer in child.children():
                yield from _layers(layer) if isinstance(layer, lists) else (layer,)
        else:
            yield from _layers(child)
