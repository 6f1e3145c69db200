"""``autoparallel explain --lengths``: steps whose sequences have several lengths."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import autoparallel
from autoparallel.__main__ import run_command
from autoparallel.agents.documents import document_schema
from autoparallel.analysis.lengths import _Steps, price_lengths
from autoparallel.analysis.plan_model import PlanModel, load_plan_model
from autoparallel.planner.errors import PlanError, UsageError
from autoparallel.planning.document_lengths import mean_length, read_lengths

SETTING = {"cluster": "cpu:2", "global_batch": 8, "profile": "analytic"}
FORCED = "dp=2,zero=1,microbatches=1,recompute=none"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "max_position_embeddings": 512,
}
LENGTHS = [40] * 90 + [200] * 8 + [500] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths")
    (path / "lengths.txt").write_text("# a corpus\n\n" + "\n".join(map(str, LENGTHS)))
    (path / "config.json").write_text(json.dumps(LLAMA))
    for seq in (512, 256):
        found = autoparallel.plan(f"hf:{path}", seq=seq, parallel=FORCED, **SETTING)
        autoparallel.save_plan(found, path / f"{seq}.json")
    return path


def model_of(path: Path) -> PlanModel:
    return load_plan_model(autoparallel.load_plan(path), str(path), trust=True)


def test_shares_of_steps_are_those_of_drawn_samples() -> None:
    steps, drawn = _Steps(sorted(LENGTHS), 8), random.Random(0)
    longest = [max(drawn.choices(LENGTHS, k=8)) for _ in range(20_000)]
    for length in (40, 200, 499, 500):
        found = sum(each <= length for each in longest) / len(longest)
        assert steps.share_upto(length) == pytest.approx(found, abs=0.02)
    assert set(steps.candidates(512)) == {64, 256}


def test_a_bucket_takes_as_long_as_a_plan_of_its_length(folder: Path) -> None:
    """Samples alone are split in both; a bucket has an op or two that cut buffers."""
    found = price_lengths(model_of(folder / "512.json"), LENGTHS)
    own = autoparallel.load_plan(folder / "256.json").prediction.step_seconds
    whole = autoparallel.load_plan(folder / "512.json").prediction.step_seconds
    two = found.options[2]
    assert two.buckets == (64, 256, 512)
    assert two.seconds[1:] == (pytest.approx(own, rel=1e-3), whole)
    mean = sum(share * each for share, each in zip(two.shares, two.seconds, strict=True))
    assert two.step_seconds == pytest.approx(mean)
    assert sum(two.shares) == pytest.approx(1)
    assert [each.step_seconds for each in found.options] == sorted(
        (each.step_seconds for each in found.options), reverse=True
    )
    assert [each.rows[0] for each in found.options] == [8] * 3
    assert found.options[0].padding == pytest.approx(1 - 62 / 512)
    assert found.options[0].tokens_per_second == pytest.approx(8 * 62 / whole)


def test_grouped_batches_have_the_planned_positions(folder: Path) -> None:
    """90 sequences of 40 positions fill 90 / 64 batches of 64 rows, 8 of 200 half of one of 16
    rows, and 2 of 500 a quarter of one of 8 rows."""
    found = price_lengths(model_of(folder / "512.json"), LENGTHS)
    one = found.grouped[2]
    assert (one.buckets, one.rows) == ((64, 256, 512), (64, 16, 8))
    steps = [90 / 64, 8 / 16, 2 / 8]
    assert one.shares == pytest.approx([each / sum(steps) for each in steps])
    seconds = sum(number * each for number, each in zip(steps, one.seconds, strict=True))
    assert one.tokens_per_second == pytest.approx(sum(LENGTHS) / seconds)
    assert one.padding == pytest.approx(1 - sum(LENGTHS) / (90 * 64 + 8 * 256 + 2 * 512))


def test_the_page_says_the_buckets_of_a_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["explain", str(folder / "512.json"), "--trust", "--lengths"]
    assert run_command([*arguments, str(folder / "lengths.txt")]) == 0
    page = capsys.readouterr().out
    assert "Step(model, buckets=(64, 256))" in page
    assert "Step(model, buckets={64: 64, 256: 16})" in page
    assert max(map(len, page.splitlines())) <= 80
    assert run_command([*arguments, str(folder / "lengths.txt"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(document_schema("explain")).validate(document)
    found = document["result"]
    assert found["number"] == len(LENGTHS)
    assert [len(each["buckets"]) for each in found["options"]] == [1, 2, 3]
    assert [len(each["rows"]) for each in found["grouped"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "why"),
    [("12\nx\n", "line 2 is 'x'"), ("0\n", "line 1 is '0'"), ("# none\n", "no line with a number")],
)
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match="AP379") as found:
        read_lengths(path)
    assert why in found.value.why


def test_sequences_longer_than_planned_and_models_that_cannot_be_padded_are_refused(
    folder: Path,
) -> None:
    with pytest.raises(UsageError, match="1 of 2 sequences are longer than the plan's 256"):
        price_lengths(model_of(folder / "256.json"), [10, 300])
    bidirectional = autoparallel.plan("hf:tests/zoo/bert", seq=32, parallel=FORCED, **SETTING)
    autoparallel.save_plan(bidirectional, folder / "both.json")
    with pytest.raises(PlanError, match="AP560"):
        price_lengths(model_of(folder / "both.json"), [16])


def test_documents_are_packed_in_the_order_of_the_file_and_cut_at_the_end_of_a_sequence() -> None:
    """The length of its document is counted for each position."""
    drawn = random.Random(0)
    for _ in range(20):
        lengths = [drawn.randint(1, 30) for _ in range(drawn.randint(1, 20))]
        owner = [number for number, length in enumerate(lengths) for _ in range(length)]
        rows = [owner[start : start + 16] for start in range(0, len(owner), 16)]
        counted = [row.count(document) for row in rows for document in row]
        assert mean_length(lengths, 16) == pytest.approx(sum(counted) / len(counted))


def test_a_plan_of_packed_documents_is_priced_by_their_lengths(folder: Path) -> None:
    """Documents of 40 positions in sequences of 512 have a thirteenth of the pairs."""
    short, whole = folder / "short.txt", folder / "whole.txt"
    short.write_text("40\n" * 100)
    whole.write_text("512\n")
    found = []
    for number, lengths in enumerate(([], ["--lengths", str(short)], ["--lengths", str(whole)])):
        output = str(folder / f"packed{number}.json")
        given = ["--cluster", "cpu:2", "--global-batch", "8", "--seq", "512", "--parallel", FORCED]
        given += ["--set", "packed=True", "--profile", "analytic", *lengths, "-o", output]
        assert run_command(["plan", f"hf:{folder}", *given]) == 0
        found.append(autoparallel.load_plan(output))
    plain, by_short, by_whole = found
    assert by_whole.prediction == plain.prediction
    assert by_short.prediction.step_seconds < plain.prediction.step_seconds
    assert by_short.model.fingerprint == plain.model.fingerprint


def test_lengths_of_documents_need_a_model_that_packs_them(folder: Path) -> None:
    lengths = str(folder / "lengths.txt")
    with pytest.raises(UsageError, match="AP178"):
        autoparallel.plan(f"hf:{folder}", seq=64, lengths=lengths, parallel=FORCED, **SETTING)
