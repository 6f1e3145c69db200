"""Cases: their keys, and their way through JSON."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest
import torch
from profile_cases import attention, gelu, linear, ref

from autoparallel.cost_model.profile.case import (
    ProfileError,
    canonical,
    case_from_json,
    case_to_json,
)


def test_equal_work_has_one_key_and_any_difference_another() -> None:
    cases = [
        linear(4, 8, 16),
        linear(8, 4, 16),
        linear(4, 8, 16, grad=False),
        gelu(4, 8),
        gelu(4, 8, dtype="bfloat16"),
        attention(2, 8, 4),
        attention(2, 8, 4, is_causal=True),
    ]
    assert len({case.key() for case in cases}) == len(set(cases)) == len(cases)
    assert linear(4, 8, 16).key() == linear(4, 8, 16).key()


def test_work_in_tf32_is_other_work_than_in_full_float32() -> None:
    full = linear(4, 8, 16)
    fast = replace(full, tf32=("matmul",))
    assert fast != full
    assert fast.key() != full.key()
    assert (full.dtype, fast.dtype) == ("float32", "tfloat32")
    assert case_from_json(json.loads(json.dumps(case_to_json(fast)))) == fast


@pytest.mark.parametrize(
    ("family", "dtype", "on_gpu", "tf32"),
    [
        ("conv", "float32", True, ("conv",)),
        ("block", "float32", True, ("conv",)),
        ("matmul", "float32", True, ()),
        ("conv", "bfloat16", True, ()),
        ("conv", "float32", False, ()),
    ],
)
def test_old_records_are_of_torchs_default(
    family: str, dtype: str, on_gpu: bool, tf32: tuple[str, ...]
) -> None:
    tensors = tuple(replace(each, dtype=dtype) for each in linear(4, 8, 16).tensors)
    written = case_to_json(replace(linear(4, 8, 16), family=family, tensors=tensors))
    assert case_from_json(written, on_gpu=on_gpu).tf32 == ()
    del written["tf32"]
    assert case_from_json(written, on_gpu=on_gpu).tf32 == tf32


def test_features_are_no_part_of_the_key() -> None:
    case = linear(4, 8, 16)
    other = replace(case, flops=(1.0, 2.0), family="elementwise", products=())
    assert other == case
    assert other.key() == case.key()
    assert hash(other) == hash(case)


def test_a_case_survives_json_with_its_features() -> None:
    for case in (linear(4, 8, 16), attention(2, 8, 4, is_causal=True)):
        again = case_from_json(json.loads(json.dumps(case_to_json(case))))
        assert astuple(again) == astuple(case)


def test_arguments_of_torchs_own_types_are_written_by_name() -> None:
    text = canonical(
        (ref(0), torch.bfloat16),
        {"device": torch.device("meta"), "memory_format": torch.contiguous_format, "p": 1e400},
    )
    assert json.loads(text) == [
        [{"tensor": 0}, {"dtype": "bfloat16"}],
        {
            "device": {"device": ""},
            "memory_format": {"memory_format": "contiguous_format"},
            "p": {"float": "inf"},
        },
    ]


def test_keyword_order_does_not_matter() -> None:
    assert canonical((), {"a": 1, "b": 2}) == canonical((), {"b": 2, "a": 1})


def test_an_argument_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ProfileError, match="type object cannot be stored"):
        canonical((object(),), {})


def test_what_is_no_case_is_refused() -> None:
    with pytest.raises(ProfileError, match="not an op case"):
        case_from_json({"op": "aten.gelu.default"})
