"""Text becomes rows of tokens: all of them, once an epoch, the same for every division."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from finetuned_models import save_tokenizer, words

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.launch.process import Worker
from autoparallel.target.load import load_target
from autoparallel.training import text_data
from autoparallel.training.text_data import PackedText, open_tokens


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPARALLEL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()


def tokens_of(place: Path, vocabulary: int = 300) -> list[int]:
    model = str(place.parent / "model")
    return open_tokens(str(place), model, vocabulary=vocabulary).tolist()


def test_without_a_tokenizer_tokens_are_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("cat é")
    assert tokens_of(tmp_path / "a.txt") == list("cat é".encode())


def test_with_a_tokenizer_tokens_are_its_own_and_texts_end_with_its_mark(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "model", words())
    lines = words(3).splitlines()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    expected = [[*tokenizer.encode(line), tokenizer.eos_token_id] for line in lines]
    assert tokens_of(tmp_path / "a.jsonl") == list(itertools.chain(*expected))


def test_a_long_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data, "PIECE", 50)
    (tmp_path / "a.txt").write_text(words())
    assert bytes(tokens_of(tmp_path / "a.txt")).decode() == words()


def test_a_folder_is_its_texts_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "x.txt").write_text(name)
    assert tokens_of(tmp_path / "texts") == list(b"ab")


def test_tokens_are_made_once_and_again_when_the_text_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    assert tokens_of(path) == list(b"one")
    with monkeypatch.context() as patched:
        patched.setattr(text_data, "_write_tokens", None)
        assert tokens_of(path) == list(b"one")
    path.write_text("other")
    assert tokens_of(path) == list(b"other")
    assert [file.suffix for file in (tmp_path / "cache" / "tokens").iterdir()] == [".tokens"] * 2


def test_an_epoch_has_every_row_once_and_the_next_another_order() -> None:
    rows = PackedText(np.arange(70, dtype=np.uint32), seq=7, seed=1)
    batches = list(itertools.islice(rows.batches(0, 1, 5), 4))
    order = [
        [int(row[0]) for batch in half for row in batch["input_ids"]]
        for half in (batches[:2], batches[2:])
    ]
    assert sorted(order[0]) == sorted(order[1]) == list(range(0, 70, 7))
    assert order[0] != order[1]
    for batch in batches:
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert torch.equal(
            batch["input_ids"] - batch["input_ids"][:, :1], torch.arange(7).repeat(5, 1)
        )


def test_shares_put_together_are_the_global_batch() -> None:
    rows = PackedText(np.arange(90, dtype=np.uint32), seq=4, seed=3)
    whole = rows.batches(0, 1, 6)
    shares = [rows.batches(rank, 3, 6) for rank in range(3)]
    for _ in range(5):
        parts = torch.cat([next(share)["input_ids"] for share in shares])
        assert torch.equal(parts, next(whole)["input_ids"])


def test_text_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"AP865.*no file"):
        tokens_of(tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"AP865.*holds no \.txt"):
        tokens_of(tmp_path / "empty")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"words": "y"}\n')
    with pytest.raises(UsageError, match=r"AP865.*a line has no text\n.*a.jsonl:2"):
        tokens_of(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"AP865.*UTF-8"):
        tokens_of(tmp_path / "b.txt")
    with pytest.raises(UsageError, match=r"AP865.*fewer than one sequence of 8"):
        PackedText(np.arange(7, dtype=np.uint32), seq=8, seed=0)


def test_positions_of_packed_text_restart_after_the_end_of_a_text(tmp_path: Path) -> None:
    """Rows of four of the tokens 1 2 0, 3 0, 4 5 6 0, 7; the end token 0 belongs to its text."""
    tokens = np.array([1, 2, 0, 3, 0, 4, 5, 6, 0, 7, 8, 9], dtype=np.uint32)
    batch = next(PackedText(tokens, seq=4, seed=0, end=0).batches(0, 1, global_batch=3))
    rows = dict(zip(map(tuple, batch["input_ids"].tolist()), batch["position_ids"], strict=True))
    found = {row: positions.tolist() for row, positions in rows.items()}
    wanted = {(1, 2, 0, 3): [0, 1, 2, 0], (0, 4, 5, 6): [0, 0, 1, 2], (0, 7, 8, 9): [0, 0, 1, 2]}
    assert found == wanted


def test_text_without_end_tokens_is_not_packed(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text("cat")
    target = load_target(f"hf:{tmp_path / 'model'}", {"packed": True})
    worker = Worker(0, 1, 0, None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"AP865.*no end token"):
        text_data.with_text(target, str(tmp_path / "a.txt"), worker)


def test_models_that_take_no_text_are_refused() -> None:
    worker = Worker(0, 1, 0, None)  # type: ignore[arg-type]
    for name in ("examples/gpt.py", "hf:tests/zoo/bert", "hf:tests/zoo/vit"):
        with pytest.raises(UsageError, match="AP864"):
            text_data.with_text(load_target(name), "text.txt", worker)


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("~")
    with pytest.raises(UsageError, match=r"AP866.*token 126.*only 100"):
        tokens_of(tmp_path / "a.txt", vocabulary=100)
