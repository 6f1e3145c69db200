"""Random models train as plain PyTorch does, and their texts are Python."""

import ast
from collections.abc import Iterator

import pytest

from benchmarks.fuzz.draw import ALTERNATIVES, NUMBER, draw_model
from benchmarks.fuzz.pool import Pool, draw_trial
from benchmarks.fuzz.snippets import (
    GLUE,
    IMAGES,
    LAYERS,
    NORMS,
    PIXELS,
    POSITIONS,
    REGIONS,
    ROWS,
    SEQUENCE,
)


def every_choice(text: str) -> Iterator[str]:
    """Yield a text with every combination of its alternatives."""
    match = ALTERNATIVES.search(text)
    if match is None:
        yield text
        return
    for choice in match[1].split("|"):
        yield from every_choice(text[: match.start()] + choice + text[match.end() :])


def test_every_choice_of_every_part_is_python() -> None:
    texts = [*POSITIONS, *ROWS, *PIXELS]
    for snippet in (*NORMS, *LAYERS, *SEQUENCE, *IMAGES, *GLUE, *REGIONS):
        texts += [snippet.init, snippet.forward]
    for text in texts:
        for choice in every_choice(text):
            lines = [*NUMBER.sub("1", choice).split("\n"), "pass"]
            tree = ast.parse("def forward():\n" + "\n".join(f"    {line}" for line in lines))
            assert isinstance(tree.body[0], ast.FunctionDef), choice


def test_a_seed_alone_makes_a_model_and_its_plan() -> None:
    assert draw_model(3).source() == draw_model(3).source()
    assert draw_trial(3, 2) == draw_trial(3, 2)


@pytest.mark.parametrize(
    "seeds",
    [range(2), pytest.param(range(2, 40), marks=(pytest.mark.slow, pytest.mark.timeout(900)))],
    ids=["quick", "more"],
)
def test_random_models_train_as_plain_pytorch_does(seeds: range) -> None:
    with Pool(2) as pool:
        ends = {seed: pool.run(draw_trial(seed, 2)) for seed in seeds}
    assert {s: end for s, end in ends.items() if end.kind not in ("equal", "refused")} == {}
