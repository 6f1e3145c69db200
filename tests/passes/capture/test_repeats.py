"""Capturing a few of many alike layers gives what capturing all of them gives."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from capture_models import gpt_batch, small_gpt
from torch import Tensor, nn
from torch.nn import functional
from whole_captures import assert_same, snapshot, whole

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.capture.repeats import find_repeats
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.ops.names import Names, base_name
from autoparallel.planner.errors import CaptureError

DEPTH = 8
RUNS: list[int] = []
"""One entry for each time that a ``Layer`` below runs."""
KEPT: list[Tensor] = []
"""What layers leave behind for others."""


def check(build: Callable[[], nn.Module], batch: Any, **options: Any) -> int:
    """Assert that both ways of capturing agree and leave the model as it was; the number of
    layers that ran when few were to be captured."""
    model = record_build(build).model
    expected = whole(model, batch, **options)
    before = snapshot(model)
    RUNS.clear()
    assert_same(capture(model, batch, **options), expected)
    runs = len(RUNS)
    assert snapshot(model) == before
    return runs


class Layer(nn.Module):
    """A residual layer; what other tests need to know of it is set from outside."""

    def __init__(self, number: int = 0, width: int = 8) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(1)
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """``kind(number)`` for each of the layers, one after the other."""

    def __init__(self, kind: Callable[[int], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.layers = nn.ModuleList(kind(number) for number in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        KEPT.clear()
        Counting.calls.clear()
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = (torch.randn(2, 4, 8),)


def test_of_alike_layers_the_first_two_and_the_last_are_run() -> None:
    assert check(Stack, X) == 3
    assert check(lambda: Stack(depth=20), X, dtype="float64") == 3


def test_the_example_model_is_captured_the_same() -> None:
    check(lambda: small_gpt(n_layer=DEPTH), gpt_batch(), dtype="bfloat16")


class Alternating(Layer):
    """Every third layer is of another kind."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.is_smooth = number % 3 == 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh() if self.is_smooth else x)


def test_layers_of_two_kinds_in_turn_are_three_of_each() -> None:
    assert check(lambda: Stack(Alternating, 18), X) == 6


class Scaled(Layer):
    """Divides by its own number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.number + 1)


class Late(Layer):
    """Does something else from its sixth on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh() if self.number >= 5 else x)


class Looked(Layer):
    """Only asks whether it has a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if hasattr(self, "number") else x.tanh())


class Rated(Layer):
    """A rate that grows with depth."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.rate = 0.1 * number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 - self.rate))


class Counting(Layer):
    """Counts its calls in a place that all share."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.shared = Counting.calls

    def forward(self, x: Tensor) -> Tensor:
        self.shared["all"] += 1
        return super().forward(x.tanh() if self.shared["all"] % DEPTH == 6 else x)


class Writing(Layer):
    """Writes to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


class Leaking(Layer):
    """Leaves a value behind that the next layer takes up."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(1)
        y = self.up(self.norm(x))
        y = y + KEPT[-1] if len(KEPT) else y
        KEPT[:] = [y]
        return x + self.down(y)


class Random(Layer):
    """Drops twice."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(functional.dropout(x, 0.1)), 0.2)


class Normed(Layer):
    """Keeps running statistics."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.batch_norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.batch_norm(x))


@pytest.mark.parametrize("kind", [Scaled, Late, Looked, Rated, Counting, Writing, Leaking])
def test_layers_that_depend_on_their_number_or_change_things_are_all_captured(kind: Any) -> None:
    assert check(lambda: Stack(kind), X) >= DEPTH


@pytest.mark.parametrize("kind", [Random, Normed])
def test_random_calls_and_running_statistics_are_each_layers_own(kind: Any) -> None:
    assert check(lambda: Stack(kind), X) == 3


class Numbered(Stack):
    """The code around the layers knows their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) * (number + 1)
            if number == 5:
                x = x.tanh()
        return (x / len(self.layers)).square().mean()


class Skipping(Stack):
    """A U: what the first half gives comes back in the second."""

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.enter(x), []
        for number, layer in enumerate(self.layers):
            if number >= DEPTH // 2:
                x = x + kept.pop()
            x = layer(x)
            if number < DEPTH // 2:
                kept.append(x)
        return x.square().mean()


class Collecting(Stack):
    """The loss reads what every layer gives."""

    def forward(self, x: Tensor) -> Tensor:
        states = [self.enter(x)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return torch.stack(states).square().mean()


class Twice(Stack):
    """All layers, and all layers again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.tanh())


class Frozen(Stack):
    """Nothing before the first layer is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.enter.requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "runs"), [(Numbered, 3), (Skipping, 3), (Collecting, 3), (Twice, 4)]
)
def test_what_happens_between_layers_is_captured_as_it_is(kind: Any, runs: int) -> None:
    assert check(kind, X) == runs


def test_a_first_layer_that_is_given_no_gradient_is_a_kind_of_its_own() -> None:
    assert check(Frozen, X) < 2 * DEPTH


class Told(Stack):
    """Layers that are called in two ways in turn."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            x = layer(x if number % 2 else x.transpose(0, 1).contiguous().transpose(0, 1))
        return x.square().mean()


def test_layers_called_in_two_ways_are_captured_in_both() -> None:
    assert check(lambda: Told(depth=16), X) < 16


class Tied(Stack):
    """All layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up.weight = self.layers[0].up.weight  # type: ignore[union-attr]


class SharedPart(Stack):
    """All layers share one submodule."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.up = self.layers[0].up  # type: ignore[union-attr]


class Unused(Stack):
    """The last layers' results go nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.enter(x), x
        for number, layer in enumerate(self.layers):
            y = layer(x)
            x = y if number < 4 else x
        return x.square().mean()


@pytest.mark.parametrize("kind", [Tied, SharedPart, Unused])
def test_shared_weights_and_unused_layers_are_captured_the_same(kind: Any) -> None:
    assert check(kind, X) >= DEPTH


class Nested(nn.Module):
    """Lists in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*(Layer(width=width) for _ in range(6))) for width in (8, 16)
        )
        self.widen = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[1](self.widen(self.stages[0](x))).square().mean()


def test_lists_inside_lists_are_looked_into() -> None:
    groups = [set(repeat.members) for repeat in find_repeats(Nested())]
    assert len(groups) == 2
    assert {f"stages.1.{number}" for number in range(6)} in groups
    assert check(Nested, X) == 7


class Failing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.up(x))  # the line that is named


def test_an_error_names_the_line_as_ever_and_the_model_is_left_as_it_was() -> None:
    model = record_build(lambda: Stack(Failing)).model
    before = snapshot(model)
    with pytest.raises(CaptureError) as caught:
        capture(model, X)
    assert caught.value.code == "AP201"
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "the line that is named" in text)
    assert caught.value.where.startswith(f"{__file__}:{line}")
    assert snapshot(model) == before


def test_a_few_layers_are_left_alone() -> None:
    assert not find_repeats(Stack(depth=4))
    assert not find_repeats(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))))


def test_names_are_numbered_in_their_order_and_never_given_twice() -> None:
    names = Names(["add", "linear_1"])
    given = [
        names.next(base_name(name)) for name in ("add_7", "linear", "linear_9", "sum_4", "add")
    ]
    assert given == ["add_", "linear", "linear_1_", "sum_1", "add_1"]


def test_no_more_layers_run_for_a_deeper_model() -> None:
    counts = []
    for depth in (8, 16, 64):
        RUNS.clear()
        program = capture(record_build(lambda depth=depth: Stack(depth=depth)).model, X)
        counts.append(len(RUNS))
        assert len(program.blocks.blocks) == depth + 2
    assert counts == [3, 3, 3]


class Bare(Layer):
    """Has a setting that the test chooses."""

    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.setting = setting


def scaled_by(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


class Point:
    """A setting that is an object."""

    def __init__(self, at: float) -> None:
        self.at = at

    def method(self) -> float:
        return self.at


class Slotted:
    """An object that holds values outside of its ``__dict__``."""

    __slots__ = ("__dict__", "at")


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("make", "is_alike"),
    [
        (lambda number: 0.5, True),
        (lambda number: number, True),
        (lambda number: 0.5 * number, False),
        (lambda number: [1, (2, "a")], True),
        (lambda number: [1] * (number + 1), False),
        (lambda number: {"a": 1, "b": {2}}, True),
        (lambda number: {"a": 1.0 + number}, False),
        (lambda number: {Point(1.0)}, False),
        (lambda number: torch.ones(2), False),
        (lambda number: scaled_by(2.0), True),
        (lambda number: scaled_by(2.0 + number), False),
        (lambda number: functools.partial(max, 2.0), True),
        (lambda number: functools.partial(max, 2.0 + number), False),
        (lambda number: Point(1.0), True),
        (lambda number: Point(1.0 + number), False),
        (lambda number: Point(1.0).method, False),
        (lambda number: Slotted(), False),
        (lambda number: nested(20), False),
    ],
)
def test_layers_are_alike_where_settings_hold_the_same_or_count_the_layers(
    make: Callable[[int], Any], is_alike: bool
) -> None:
    """In doubt they are not: tensors, methods, slots and deep nests are never compared."""
    model = Stack(lambda number: Bare(make(number)))
    repeats = find_repeats(model)
    assert [len(each.members) for each in repeats] == ([DEPTH] if is_alike else [])


def with_another_module(layer: Layer) -> None:
    layer.more = nn.Linear(8, 8)


def with_another_type(layer: Layer) -> None:
    layer.norm = nn.LayerNorm(8, elementwise_affine=True)
    layer.norm.__class__ = type("OtherNorm", (nn.LayerNorm,), {})


def without_a_parameter(layer: Layer) -> None:
    layer.up.bias = None


def with_another_parameter(layer: Layer) -> None:
    layer.up.scale = nn.Parameter(torch.ones(1))


def with_another_width(layer: Layer) -> None:
    layer.up.weight = nn.Parameter(torch.ones(4, 8))


def with_an_unsaved_buffer(layer: Layer) -> None:
    layer.up.register_buffer("seen", torch.zeros(1), persistent=False)


def with_another_setting(layer: Layer) -> None:
    layer.up.rate = 0.5


def with_a_hook(layer: Layer) -> None:
    layer.up.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    "change",
    [
        with_another_module,
        with_another_type,
        without_a_parameter,
        with_another_parameter,
        with_another_width,
        with_an_unsaved_buffer,
        with_another_setting,
        with_a_hook,
    ],
)
def test_a_layer_with_another_structure_is_in_no_group(change: Callable[[Layer], None]) -> None:
    model = Stack()
    change(model.layers[3])  # type: ignore[arg-type]
    (repeat,) = find_repeats(model)
    assert set(repeat.members) == {f"layers.{number}" for number in range(DEPTH) if number != 3}


@pytest.mark.parametrize(("num_others", "found"), [(15, [6]), (16, [])])
def test_a_list_of_more_than_sixteen_kinds_is_not_looked_into(
    num_others: int, found: list[int]
) -> None:
    """Six layers of one kind, and others of a width of their own."""
    others = [Layer(width=9 + number) for number in range(num_others)]
    repeats = find_repeats(nn.Sequential(*(Layer() for _ in range(6)), *others))
    assert [len(repeat.members) for repeat in repeats] == found
