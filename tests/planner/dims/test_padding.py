"""Shorter sequences, padded: the loss and gradients of the shorter ones, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention import Layer
from torch import Tensor, nn

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.passes.programs.program import Program
from autoparallel.planner.dims.padding import Padding, find_padding
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.runtime.data.variants import SequencePadding

ROWS, SEQ, WIDTH, WORDS = 2, 8, 8, 11
cross_entropy = nn.functional.cross_entropy


class Net(nn.Module):
    """Words, causal attention unless told otherwise, and the loss that is given."""

    def __init__(
        self, loss: Callable[[Tensor, Tensor], Tensor], *, causal: bool = True, scans: bool = False
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layer, self.head, self.loss = Layer(WIDTH, causal), nn.Linear(WIDTH, WORDS), loss
        self.scans = scans

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        x = self.layer(x)
        return self.loss(self.head(x.cumsum(1) if self.scans else x), labels)


def mean(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten())


def other_index(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=3)


def transposed(scores: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * cross_entropy(scores.transpose(1, 2), labels, label_smoothing=0.1)


def summed(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")


def shifted(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def shifted_as_hugging_face(scores: Tensor, labels: Tensor) -> Tensor:
    later = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return cross_entropy(scores.flatten(0, 1), later.view(-1))


EXACT = (mean, other_index, transposed, summed, shifted, shifted_as_hugging_face)


def captured(model: Callable[[], nn.Module], rows: int = ROWS) -> Program:
    with torch.device("meta"):
        made = model()
    batch = {
        name: torch.empty(rows, SEQ, dtype=torch.int64, device="meta")
        for name in ("words", "labels")
    }
    return capture(made, batch, dtype="float64")


@pytest.mark.parametrize(
    "length", [5, *(pytest.param(length, marks=pytest.mark.slow) for length in (1, SEQ - 1))]
)
@pytest.mark.parametrize("loss", EXACT)
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_a_padded_batch_has_the_loss_and_gradients_of_the_shorter_one(rows, loss, length) -> None:
    """A batch of one row has no rows that could be divided."""
    program = captured(lambda: Net(loss), rows)
    torch.manual_seed(0)
    model = Net(loss).double()
    batch = {name: torch.randint(0, WORDS, (rows, length)) for name in ("words", "labels")}
    if length == 1 and loss in (shifted, shifted_as_hugging_face):
        return  # no word has a next one
    whole = SequencePadding(program.graph)(batch)
    assert {tensor.shape for tensor in whole.values()} == {(rows, SEQ)}
    model(**batch).backward()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    names = [node.name for node in program.graph if node.kind == "constant"]
    constants = evaluate(program, names)
    found = run(program.graph, {**weights, **whole, **constants, **program.literals})
    found.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(found, model(**batch), rtol=1e-12, atol=1e-14)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-11, atol=1e-13)


class Packed(nn.Module):
    """Attention within documents, or in a window, of words whose positions are an input."""

    def __init__(self, window: int = 0, reverses: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.window, self.reverses = window, reverses

    def forward(self, words: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        x = self.words(words).unsqueeze(1)
        places = torch.arange(words.shape[1])
        seen = places <= places[:, None]
        if self.window:
            seen = seen & (places > places[:, None] - self.window)
        else:
            ids = (positions == 0).cumsum(-1)
            ids = ids.flip(-1).cumsum(-1) if self.reverses else ids
            seen = seen & (ids[:, None, :, None] == ids[:, None, None])
        x = nn.functional.scaled_dot_product_attention(x, x, x, seen).squeeze(1)
        return mean(self.head(x) + positions.unsqueeze(-1), labels)


def captured_with_positions(model: Packed) -> Program:
    names = ("words", "labels", "positions")
    batch = {name: torch.zeros(ROWS, SEQ, dtype=torch.int64) for name in names}
    return capture(model, batch, dtype="float64")


@pytest.mark.parametrize("window", [0, 3])
def test_packed_documents_and_windows_may_be_padded(window: int) -> None:
    torch.manual_seed(0)
    model = Packed(window).double()
    program = captured_with_positions(model)
    (attention,) = [node for node in program.graph if "attention" in node.op]
    assert attention.args[3] is None
    batch = {name: torch.randint(0, WORDS, (ROWS, 5)) for name in ("words", "labels")}
    batch["positions"] = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    whole = SequencePadding(program.graph)(batch)
    assert {tensor.shape for tensor in whole.values()} == {(ROWS, SEQ)}
    loss = model(**batch)
    names = [node.name for node in program.graph if node.kind == "constant"]
    given = {**dict(model.named_parameters()), **whole, **evaluate(program, names)}
    found = run(program.graph, given)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-14)
    weights = list(model.parameters())
    for own, other in zip(
        torch.autograd.grad(found, weights), torch.autograd.grad(loss, weights), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-13)


def test_documents_that_depend_on_later_positions_are_not_padded() -> None:
    graph = captured_with_positions(Packed(reverses=True)).graph
    assert any("documents" in node.kwargs for node in graph)
    with pytest.raises(PlanError, match="be padded") as caught:
        find_padding(graph)
    assert caught.value.why == "its documents may depend on later positions"


def test_words_are_padded_with_one_that_exists_and_labels_with_what_the_loss_ignores() -> None:
    graph = captured(lambda: Net(mean)).graph
    assert find_padding(graph) == (SEQ, {"words": Padding((1,), 0), "labels": Padding((1,), -100)})
    assert find_padding(captured(lambda: Net(other_index)).graph)[1]["labels"].value == 3


def earlier_targets(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores[:, 1:].flatten(0, 1), labels[:, :-1].flatten())


def counting_labels(scores: Tensor, labels: Tensor) -> Tensor:
    return summed(scores, labels) / (labels != 3).sum()


def mean_of_all(scores: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").mean()


def sum_of_squares(scores: Tensor, labels: Tensor) -> Tensor:
    return mean(scores, labels) + scores.square().sum()


def divided_by_length(scores: Tensor, labels: Tensor) -> Tensor:
    return summed(scores, labels) / labels.numel()


REFUSED = {
    "attention sees later positions": lambda: Net(mean, causal=False),
    "a scan, of which it is not known where it begins": lambda: Net(mean, scans=True),
    "targets are earlier": lambda: Net(earlier_targets),
    "labels are counted": lambda: Net(counting_labels),
    "a mean that ignores nothing": lambda: Net(mean_of_all),
    "a sum that ignores nothing": lambda: Net(sum_of_squares),
    "a sum divided by a number": lambda: Net(divided_by_length),
    "no targets": lambda: Net(lambda scores, labels: scores.square().mean()),
}


@pytest.mark.parametrize("model", REFUSED.values(), ids=REFUSED)
def test_what_padding_would_change_is_refused_with_its_reason(model) -> None:
    pad = SequencePadding(captured(model).graph)
    batch = {name: torch.zeros(ROWS, SEQ - 2, dtype=torch.int64) for name in ("words", "labels")}
    with pytest.raises(PlanError) as caught:
        pad(batch)
    assert caught.value.code == "AP560"
    assert caught.value.why


def test_words_that_are_their_own_labels_have_no_padding() -> None:
    class Own(Net):
        def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(words, words)

    with torch.device("meta"):
        model = Own(shifted)
    words = torch.empty(ROWS, SEQ, dtype=torch.int64, device="meta")
    with pytest.raises(PlanError, match="AP560") as caught:
        find_padding(capture(model, {"words": words}, dtype="float64").graph)
    assert "as targets and as something else" in caught.value.why


def test_batches_of_the_planned_length_and_of_longer_ones_are_left_as_they_are() -> None:
    pad = SequencePadding(captured(lambda: Net(mean, causal=False)).graph)
    for length in (SEQ, SEQ + 1):
        batch = {n: torch.zeros(ROWS, length, dtype=torch.int64) for n in ("words", "labels")}
        assert pad(batch) is batch


def test_inputs_of_several_lengths_are_refused() -> None:
    pad = SequencePadding(captured(lambda: Net(mean)).graph)
    batch = {
        "words": torch.zeros(ROWS, 5, dtype=torch.int64),
        "labels": torch.zeros(ROWS, 6, dtype=torch.int64),
    }
    with pytest.raises(UsageError, match="several lengths") as caught:
        pad(batch)
    assert "labels 6, words 5" in caught.value.why
