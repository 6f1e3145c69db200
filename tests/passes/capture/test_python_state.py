"""Values of Python that a forward reads: they are found, compared, put back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoparallel.passes.tracing.python_state import PythonState


class Gate:
    """An object that a forward calls: no module, so its values are read by name."""

    floor = 0.5

    def __init__(self) -> None:
        self.bias = 1.0

    @classmethod
    def lowest(cls) -> float:
        return cls.floor

    def apply(self, x: Tensor) -> Tensor:
        return x * self.lowest() + self.bias


class Reader(nn.Module):
    """A model whose forward reads a value of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.pair = (1, 2.0)
        self.rates = [0.1, 0.2]
        self.by_name = {"up": 1.0}
        self.table = np.array([1.0, 2.0])
        self.gate = Gate()
        self.act = self.gate.apply
        self.power = functools.partial(torch.pow, exponent=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x) * self.scale * self.pair[1] * self.rates[0] * self.by_name["up"]
        return self.power(x) * float(self.table[0]) * self.gate.bias


def changes_of(model: nn.Module, change: Callable[[Any], object], loss: Any = None) -> list[str]:
    """Return the names of the values that differ after ``change``, of which nothing is left."""
    state = PythonState(model, loss)
    before = state.read()
    change(model)
    changes = state.changes(before, state.read())
    state.restore(before)
    assert not state.changes(before, state.read())
    return changes


def swap_gate(model: Reader) -> None:
    model.act = Gate().apply


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda model: setattr(model, "scale", 3.0), ["scale of the model"]),
        (lambda model: setattr(model, "scale", 3), ["scale of the model"]),
        (lambda model: setattr(model, "pair", (1, 3.0)), ["pair of the model"]),
        (lambda model: setattr(model, "pair", (1, 2.0)), []),
        (lambda model: model.rates.__setitem__(1, 0.3), ["rates of the model[1]"]),
        (lambda model: model.by_name.__setitem__("up", 0.3), ["by_name of the model[up]"]),
        (lambda model: setattr(model, "table", np.array([1.0, 3.0])), ["table of the model"]),
        (lambda model: setattr(model, "table", np.array([1.0, 2.0])), []),
        (lambda model: setattr(model, "act", model.gate.apply), []),
        (swap_gate, ["act of the model"]),
    ],
)
def test_a_changed_value_is_named_and_put_back_and_an_equal_one_is_no_change(
    change: Callable[[Any], object], names: list[str]
) -> None:
    assert changes_of(Reader(), change) == names


def test_entries_that_come_and_go_are_changes_and_are_put_back() -> None:
    model = Reader()
    names = changes_of(model, lambda model: model.rates.pop())
    assert "rates of the model[1]" in names
    assert model.rates == [0.1, 0.2]
    names = changes_of(model, lambda model: model.by_name.clear())
    assert "by_name of the model[up]" in names
    assert model.by_name == {"up": 1.0}


def test_an_entry_that_was_gone_is_gone_again() -> None:
    state = PythonState(model := Reader())
    model.rates.pop()
    shorter = state.read()
    model.rates.append(0.9)
    assert "rates of the model[1]" in state.changes(shorter, state.read())
    state.restore(shorter)
    assert model.rates == [0.1]


def test_an_array_that_is_written_to_is_a_change() -> None:
    state = PythonState(model := Reader())
    before = state.read()
    model.table[0] = 7.0
    assert state.changes(before, state.read()) == ["table of the model"]


def test_an_attribute_of_a_class_is_read_and_left_to_the_user() -> None:
    """``restore`` writes to no class: forwards seldom do."""
    state = PythonState(Reader())
    before = state.read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gate, "floor", 0.25)
        assert state.changes(before, state.read()) == ["Gate.floor"]
        state.restore(before)
        assert Gate.floor == 0.25
    assert not state.changes(before, state.read())


def test_a_variable_of_a_closure_is_followed_from_empty_to_full_and_back() -> None:
    def build() -> tuple[Callable[[Tensor], Tensor], Callable[[Any], None]]:
        if not torch.is_grad_enabled():
            rate = 0.0

        def loss(output: Tensor) -> Tensor:
            return output * rate

        def give(value: float) -> None:
            nonlocal rate
            rate = value

        return loss, give

    loss, give = build()
    state = PythonState(nn.Identity(), loss)
    empty = state.read()
    give(0.5)
    half = state.read()
    assert state.changes(empty, half) == ["rate"]
    give(0.75)
    state.restore(half)
    assert loss(torch.ones(())) == 0.5


def test_values_of_a_users_module_and_of_a_module_that_two_hold_are_read_once() -> None:
    settings = types.ModuleType("settings_of_a_user")
    settings.rate = 0.5
    settings.__file__ = "settings.py"
    shared = Reader()
    outer = nn.Module()
    outer.one = shared
    outer.other = nn.ModuleList([shared])
    outer.kept = types.SimpleNamespace(inner=shared)

    def loss(output: Tensor) -> Tensor:
        return output * settings.rate * outer.kept.inner.scale

    def change(_: Any) -> None:
        settings.rate = 0.25
        shared.scale = 9.0

    assert changes_of(outer, change, loss) == [
        "scale of kept of the model.inner",
        "settings_of_a_user.rate",
    ]
    assert (settings.rate, shared.scale) == (0.5, 2.0)


class Keeping(nn.Module):
    """Leaves its result behind, in an attribute that it has and in a new attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        self.made = self.last + 1
        return self.last


def test_fake_tensors_that_a_forward_leaves_are_taken_away_and_can_come_back() -> None:
    model = Keeping()
    state = PythonState(model)
    before = state.read()
    with FakeTensorMode():
        model(torch.ones(2))
    replaced = state.forget_fakes(before)
    assert {each.key for each in replaced} == {"last", "made"}
    assert model.last is None
    assert not hasattr(model, "made")
    for each in replaced:
        assert each.is_free()
        assert not each.is_there()
        each.put_back()
        assert each.is_there()
        assert not each.is_free()


def test_a_place_that_held_no_tensor_and_holds_one_now_is_found() -> None:
    model = Keeping()
    state = PythonState(model)
    before = state.read()
    model(torch.ones(2))
    (found,) = state.new_tensors(before)
    assert found.before is None
    assert found.now is model.last
    found.take_away()
    assert model.last is None


def test_a_tensor_that_is_written_to_is_a_change_unless_it_is_of_inference() -> None:
    """A tensor of inference has no version that would tell."""
    model = Keeping()
    for mode, names in ((torch.no_grad, ["last of the model"]), (torch.inference_mode, [])):
        with mode():
            model(torch.ones(2))
            state = PythonState(model)
            before = state.read()
            model.last.add_(1)
            assert state.changes(before, state.read()) == names
