"""The measure behind ``verify``: what it calls equal and what it does not."""

from __future__ import annotations

import torch

from autoparallel.runtime.verify.verify import Piece, Verification, compare


def _whole(tensor: torch.Tensor) -> list[Piece]:
    return [(tuple((0, size) for size in tensor.shape), tensor)]


def _verification(
    reference: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]
) -> Verification:
    blocks = {"a": "layers.0", "b": "layers.1"}
    pieces = {name: _whole(tensor) for name, tensor in actual.items()}
    return Verification("float64", 1e-9, tuple(compare("gradient", reference, pieces, blocks)))


def test_equal_tensors_pass() -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2)}
    assert _verification(tensors, tensors).passed


def test_the_first_tensor_that_differs_is_named_with_its_block() -> None:
    reference = {"a": torch.ones(3), "b": torch.ones(2)}
    result = _verification(reference, {"a": torch.ones(3), "b": torch.tensor([1.0, 1.001])})
    assert [(d.name, d.block) for d in result.failures] == [("b", "layers.1")]
    assert abs(result.worst("gradient") - 1e-3) < 1e-6


def test_a_missing_or_misshapen_tensor_fails() -> None:
    assert not _verification({"a": torch.ones(3)}, {}).passed
    assert not _verification({"a": torch.ones(3)}, {"a": torch.ones(4)}).passed


def test_nan_never_passes() -> None:
    result = _verification({"a": torch.ones(1)}, {"a": torch.tensor([float("nan")])})
    assert not result.passed
    assert result.worst("gradient") != result.worst("gradient")


def test_rounding_noise_on_a_zero_gradient_is_measured_against_the_model() -> None:
    reference = {
        "a": torch.ones(1, dtype=torch.float64),
        "b": torch.full((1,), 1e-18, dtype=torch.float64),
    }
    actual = {
        "a": torch.ones(1, dtype=torch.float64),
        "b": torch.full((1,), -1e-18, dtype=torch.float64),
    }
    assert _verification(reference, actual).passed


def test_a_tensor_that_is_zero_where_it_should_not_be_fails() -> None:
    reference = {"a": torch.ones(1), "b": torch.full((1,), 1e-3)}
    assert not _verification(reference, {"a": torch.ones(1), "b": torch.zeros(1)}).passed


def test_pieces_must_cover_the_tensor_and_all_agree() -> None:
    reference = {"a": torch.arange(4.0)}
    halves = [(((0, 2),), torch.tensor([0.0, 1.0])), (((2, 4),), torch.tensor([2.0, 3.0]))]
    assert compare("weight", reference, {"a": halves}, {})[0].relative == 0.0
    assert compare("weight", reference, {"a": halves[:1]}, {})[0].relative == float("inf")
    drifted = [*halves, (((2, 4),), torch.tensor([2.0, 3.5]))]
    found = compare("weight", reference, {"a": drifted}, {})[0].relative
    assert abs(found - 0.5 / 3.0) < 1e-6


def test_a_step_along_rounding_noise_is_measured_against_the_model() -> None:
    reference = {"a": torch.ones(2), "b": torch.tensor([0.0, 1e-3])}
    gradients = {"a": torch.ones(2), "b": torch.tensor([1e-8, 1e-2])}
    moved = {name: [_whole(value)[0]] for name, value in reference.items()}
    moved["b"] = _whole(torch.tensor([1e-5, 1e-3]))
    found = compare("weight", reference, moved, {}, gradients=gradients)
    assert found[1].relative < 1e-4
    moved["b"] = _whole(torch.tensor([0.0, 1.01e-3]))
    found = compare("weight", reference, moved, {}, gradients=gradients)
    assert abs(found[1].relative - 0.01) < 1e-4
    assert compare("weight", reference, moved, {})[1].relative > 9e-3
