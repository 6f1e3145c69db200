"""Published architectures, deep enough for their layers to repeat, are captured the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from whole_captures import assert_same, snapshot, whole

from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.capture.repeats import find_repeats
from autoparallel.planning.capture import record_target
from autoparallel.target.load import load_target

ZOO = Path(__file__).parents[2] / "zoo"
DEPTH_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "decoder_layers",
    "encoder_layers",
)


def deepened(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """A configuration of another depth; kinds of layers follow their default pattern."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = deepened(value, depth)
        elif key != "layer_types":
            made[key] = depth if key in DEPTH_KEYS else value
    return made


ARCHITECTURES = {"gpt2_dropout": 6, "vit": 7}
LARGER = {
    "mixtral": 5,
    "llama": 5,
    "gemma2": 10,
    "bert": 5,
    "qwen3_moe": 6,
    "t5": 6,
    "whisper": 5,
    "gemma3_text": 7,
    "clip": 5,
}


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        *ARCHITECTURES.items(),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LARGER.items()),
    ],
)
def test_architectures_are_captured_the_same(name: str, depth: int, tmp_path: Path) -> None:
    config = json.loads((ZOO / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(deepened(config, depth)))
    target = load_target(f"hf:{tmp_path}", {})
    model = record_target(target).model
    batch = target.example_batch(2, 16)
    assert find_repeats(model)
    expected = whole(model, batch, loss_fn=target.loss_fn)
    before = snapshot(model)
    assert_same(capture(model, batch, loss_fn=target.loss_fn), expected)
    assert snapshot(model) == before
