"""Capturing every layer of a model, to compare with capturing a few of those that are alike."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autoparallel.passes.capture import capture_model as capturing
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program


def whole(model: nn.Module, batch: Any, **options: Any) -> Program:
    """The program of a model of which every layer is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "find_repeats", lambda model: ())
        return capture(model, batch, **options)


def assert_same(one: Program, other: Program) -> None:
    for mine, its in zip(one.graph.nodes, other.graph.nodes, strict=True):
        assert mine == its
    assert one.graph == other.graph
    assert list(one.graph.updates) == list(other.graph.updates)
    assert one.graph.fingerprint == other.graph.fingerprint
    assert one.blocks == other.blocks
    assert (one.inputs, one.unused) == (other.inputs, other.unused)
    assert one.literals.keys() == other.literals.keys()


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that capturing might leave behind in a model."""
    found: list[Any] = []
    for path, module in model.named_modules():
        held = {name: _identity(value) for name, value in vars(module).items()}
        inner = [list(each) for each in (module._modules, module._parameters, module._buffers)]
        tensors = [
            id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())
        ]
        found.append((path, type(module), held, inner, tensors))
    return found


def _identity(value: Any) -> Any:
    """torch.export itself puts copies in the place of tuples, lists and dicts of settings."""
    is_copied = isinstance(value, tuple | list | dict)
    return (type(value), len(value)) if is_copied else id(value)
