"""Batches that are made up for Hugging Face classes, by task, have the shapes these read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoparallel.planner.errors import UsageError
from autoparallel.target.huggingface_batch import (
    BatchSpec,
    default_sequence,
    label_names,
    make_batch,
)
from autoparallel.target.load import load_target


def wanted(name: str, main: str, takes: tuple[str, ...], **config: Any) -> BatchSpec:
    """A class of this name whose forward takes these arguments."""
    parameters = ", ".join(f"{each}=None" for each in (main, *takes))
    given: dict[str, Any] = {}
    exec(f"def forward(self, {parameters}): ...", given)
    kind = type(name, (), {"forward": given["forward"], "main_input_name": main})
    return BatchSpec(kind, SimpleNamespace(**config), rows=3, length=8)


TEXT = {"vocab_size": 50, "num_labels": 4}
CASES = {
    "BertForMaskedLM": (
        "input_ids",
        ("labels",),
        TEXT,
        {"input_ids": (3, 8), "labels": (3, 8)},
        50,
    ),
    "BertForTokenClassification": (
        "input_ids",
        ("labels",),
        TEXT,
        {"input_ids": (3, 8), "labels": (3, 8)},
        4,
    ),
    "BertForSequenceClassification": (
        "input_ids",
        ("labels",),
        TEXT,
        {"input_ids": (3, 8), "labels": (3,)},
        4,
    ),
    "BertForMultipleChoice": (
        "input_ids",
        ("labels",),
        TEXT,
        {"input_ids": (3, 2, 8), "labels": (3,)},
        2,
    ),
    "BertForNextSentencePrediction": (
        "input_ids",
        ("next_sentence_label",),
        TEXT,
        {"input_ids": (3, 8), "next_sentence_label": (3,)},
        2,
    ),
    "BertForQuestionAnswering": (
        "input_ids",
        ("start_positions", "end_positions"),
        TEXT,
        {"input_ids": (3, 8), "start_positions": (3,), "end_positions": (3,)},
        8,
    ),
    "SegformerForSemanticSegmentation": (
        "pixel_values",
        ("labels",),
        {"image_size": (32, 48), "num_channels": 3, "num_labels": 5},
        {"pixel_values": (3, 3, 32, 48), "labels": (3, 32, 48)},
        5,
    ),
    "ViTForMaskedImageModeling": (
        "pixel_values",
        ("bool_masked_pos",),
        {"image_size": 32, "patch_size": 8},
        {"pixel_values": (3, 3, 32, 32), "bool_masked_pos": (3, 16)},
        2,
    ),
    "WhisperForConditionalGeneration": (
        "input_features",
        ("labels",),
        {"max_source_positions": 20, "num_mel_bins": 6, "vocab_size": 50},
        {"input_features": (3, 6, 40), "labels": (3, 8)},
        50,
    ),
    "ASTForAudioClassification": (
        "input_values",
        ("labels",),
        {"max_length": 30, "num_mel_bins": 6, "num_labels": 3},
        {"input_values": (3, 30, 6), "labels": (3,)},
        3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_inputs_and_labels_are_those_of_the_task(name: str) -> None:
    main, takes, config, shapes, bound = CASES[name]
    batch = make_batch(wanted(name, main, takes, **config), "here")
    assert {key: tuple(tensor.shape) for key, tensor in batch.items()} == shapes
    again = make_batch(wanted(name, main, takes, **config), "here")
    for key, tensor in batch.items():
        assert torch.equal(tensor, again[key])
        if not tensor.is_floating_point():
            assert 0 <= int(tensor.min()) <= int(tensor.max()) < (50 if key == main else bound)


def test_a_wave_is_as_long_as_convolutions_need_for_a_frame_per_token() -> None:
    kernels, strides = (10, 3, 2), (5, 2, 2)
    made = wanted(
        "Wav2Vec2ForCTC",
        "input_values",
        ("labels",),
        vocab_size=32,
        conv_kernel=kernels,
        conv_stride=strides,
    )
    frames = make_batch(made, "here")["input_values"][:, None]
    for kernel, stride in zip(kernels, strides, strict=True):
        frames = nn.Conv1d(1, 1, kernel, stride)(frames)
    assert frames.shape == (3, 1, made.length + 1)


def test_packed_documents_have_positions_that_restart() -> None:
    made = wanted("LlamaForCausalLM", "input_ids", ("labels", "position_ids"), vocab_size=9)
    found = make_batch(replace(made, packed=True), "here")
    assert found["position_ids"].tolist() == [[0, 1] * 4] * 3


@pytest.mark.parametrize(
    ("target", "value", "what"),
    [
        ("hf:tests/models/llama", "true", "not True or False"),
        ("hf:tests/zoo/mpt", True, "its forward takes no position_ids"),
    ],
)
def test_a_model_that_cannot_be_packed_is_refused(target: str, value: object, what: str) -> None:
    with pytest.raises(UsageError, match=what) as found:
        load_target(target, {"packed": value})
    assert found.value.code == "AP105"


def test_a_main_input_of_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"AP109.*'voxels'"):
        make_batch(wanted("VoxelModel", "voxels", ()), "here")


def test_patches_are_hidden_only_where_they_are_to_be_found_again() -> None:
    plain = wanted("ViTForImageClassification", "pixel_values", ("bool_masked_pos", "labels"))
    assert label_names(plain.model_class) == ("labels",)


def test_a_sequence_is_as_long_as_positions_allow_up_to_1024() -> None:
    assert default_sequence(SimpleNamespace(max_position_embeddings=77)) == 77
    assert default_sequence(SimpleNamespace(text_config=SimpleNamespace(n_positions=4096))) == 1024
    assert default_sequence(SimpleNamespace()) == 1024
