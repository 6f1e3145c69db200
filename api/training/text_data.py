"""Text as batches for a causal language model: ``input_ids``, equal ``labels``, and for packed
documents ``position_ids``, which restart after each end token.

In: a text file, JSON lines with a field ``text``, or a folder of ``.txt``. The model's tokenizer
(bytes if its folder has none) turns texts into tokens, which are joined with end tokens and cut
into rows of ``seq``. The tokens are cached in a memory-mapped file in the user's cache folder. Out:
``build_data(rank, world, ...)``; every epoch reads all rows in another order, drawn from the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoparallel.cache.plan_cache import default_folder
from autoparallel.planner.errors import UsageError
from autoparallel.target.huggingface import PACKED, is_causal, model_place, target_config
from autoparallel.target.huggingface_batch import POSITIONS, field_of
from autoparallel.target.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from autoparallel.runtime.launch.process import Worker

FORMAT = 1
"""Version of the token files, which is part of their names."""

PIECE = 2**20
"""Approximate number of characters tokenized at once; a piece ends at a line end."""

WAIT_SECONDS = 0.2
JSON_LINES = (".jsonl", ".ndjson", ".json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "special_tokens_map.json",
)

Batches = Iterator[dict[str, "Tensor"]]
Progress = Callable[[str], None]
Encode = Callable[[str], list[int]]
Tokens = np.ndarray[Any, Any]


def with_text(target: Target, place: str, worker: Worker) -> Target:
    """Return ``target`` with ``build_data`` that reads the text at ``place``.

    One process of each machine writes the file of tokens, and the others wait for it. Raises
    UsageError AP864 if the target is no causal language model, AP865 if the text is unusable, and
    AP866 if a token is outside the model's vocabulary.
    """
    vocabulary, end = _vocabulary(target), _end_of(target, place)
    is_maker = worker.local_rank == 0
    tokens = open_tokens(
        place,
        model_place(target.name),
        vocabulary=vocabulary,
        is_maker=is_maker,
        tell=worker.watchdog.progress,
    )

    def build_data(rank: int, world: int, *, global_batch: int, seq: int, seed: int) -> Batches:
        return PackedText(tokens, seq, seed, place, end).batches(rank, world, global_batch)

    return replace(target, build_data=build_data)


def check_text(place: str, target: Target | None = None) -> None:
    """Raise UsageError AP865 if ``place`` has no text, AP864 if ``target`` cannot train on text."""
    if target is not None:
        _vocabulary(target)
    text_files(Path(place))


def _vocabulary(target: Target) -> int:
    """Return the size of the model's vocabulary. Raises UsageError AP864."""
    if not is_causal(target):
        raise UsageError(
            "AP864",
            "--data needs a causal language model of Hugging Face",
            where=target.name,
            fix="define build_data(rank, world) in the target's file",
        )
    return int(field_of(target_config(target), "vocab_size"))


def _end_of(target: Target, place: str) -> int | None:
    """Return the token that ends a document of packed ones; None if they are not packed. Raises
    UsageError AP865 if the tokenizer has no such token."""
    if target.settings.get(PACKED) is not True:
        return None
    for end in _encoder(model_place(target.name))[1]:
        return end
    raise UsageError(
        "AP865",
        "the documents of the text cannot be packed: the tokenizer has no end token",
        where=place,
        fix=f"leave the setting {PACKED} out, or copy the model's own tokenizer into its folder",
    )


def positions_of(tokens: Tensor, end: int) -> Tensor:
    """Return the positions of ``tokens`` (rows, positions) within documents that end with ``end``.

    >>> import torch
    >>> positions_of(torch.tensor([[5, 5, 2, 5, 2, 2]]), end=2).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    import torch

    places = torch.arange(tokens.shape[-1])
    starts = torch.where(tokens.roll(1, -1) == end, places, 0)
    return places - starts.cummax(-1).values


@dataclass(frozen=True, slots=True)
class PackedText:
    """Data set of rows of ``seq`` consecutive tokens, in an order that changes every epoch.
    ``end``: token that ends a document, if positions restart with each."""

    tokens: Tokens
    seq: int
    seed: int
    place: str = ""
    end: int | None = None

    def __post_init__(self) -> None:
        if not self.num_rows:
            raise UsageError(
                "AP865",
                f"the text has {len(self.tokens)} tokens, fewer than one sequence of {self.seq}",
                where=self.place,
                fix="plan with a shorter --seq, or give more text",
            )

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch; an incomplete last row is left out."""
        return len(self.tokens) // self.seq

    def row(self, position: int, order: Callable[[int], Tokens]) -> Tokens:
        """Return the row at ``position`` in the endless sequence of epochs. ``order(epoch)``
        returns the permutation of an epoch's rows."""
        epoch, index = divmod(position, self.num_rows)
        start = int(order(epoch)[index]) * self.seq
        return self.tokens[start : start + self.seq]

    def batches(self, rank: int, world: int, global_batch: int) -> Batches:
        """Yield, endlessly, the rows of part ``rank`` of ``world`` equal parts of each batch."""
        import torch

        share = global_batch // world
        made: dict[int, Tokens] = {}

        def order(epoch: int) -> Tokens:
            if epoch not in made:
                made.clear()
                made[epoch] = np.random.default_rng((self.seed, epoch)).permutation(self.num_rows)
            return made[epoch]

        for step in itertools.count():
            first = step * global_batch + rank * share
            rows = [self.row(position, order) for position in range(first, first + share)]
            tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
            batch = {"input_ids": tokens, "labels": tokens.clone()}
            yield batch if self.end is None else batch | {POSITIONS: positions_of(tokens, self.end)}


def open_tokens(
    place: str,
    model: str,
    *,
    vocabulary: int,
    is_maker: bool = True,
    tell: Progress = lambda what: None,
) -> Tokens:
    """Return the tokens of the text at ``place``, by the tokenizer of ``model``, memory-mapped.

    The process ``is_maker`` writes the file of tokens; others wait for it. Raises UsageError AP865
    if there is no text, and AP866 if a token is not below ``vocabulary``.
    """
    files = text_files(Path(place))
    path = default_folder() / "tokens" / f"{_digest(files, model)}.tokens"
    while not path.exists():
        if is_maker:
            _write_tokens(path, files, _encoder(model), tell)
        else:
            tell("waiting for the tokens of the text")
            time.sleep(WAIT_SECONDS)
    stored: Tokens = np.memmap(path, dtype=np.uint32, mode="r")
    if stored[0] >= vocabulary:
        raise UsageError(
            "AP866",
            f"the text has token {stored[0]}, but the model's vocabulary has only {vocabulary}",
            where=place,
            fix="copy the model's own tokenizer into its folder",
        )
    return stored[1:]


def text_files(place: Path) -> tuple[Path, ...]:
    """Return the text files at ``place``. Raises UsageError AP865 if there are none."""
    found = tuple(sorted(place.glob("**/*.txt"))) if place.is_dir() else (place,)
    if not found or not found[0].is_file():
        raise UsageError(
            "AP865",
            f"the folder {place} holds no .txt" if place.is_dir() else f"there is no file {place}",
            where=str(place.resolve()),
            fix="give a text file, JSON lines with a field text, or a folder of .txt",
        )
    return found


def texts(path: Path) -> Iterator[Iterable[str]]:
    """Yield each text of a file as an iterable of pieces; JSON lines have a text per line.

    Consume a text before asking for the next. Raises UsageError AP865 for a bad line.
    """
    with path.open(encoding="utf-8") as file:
        if path.suffix not in JSON_LINES:
            yield ("".join(lines) for lines in iter(lambda: file.readlines(PIECE), []))
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield (_text_of(line, f"{path}:{number}"),)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UsageError(
            "AP865", f"{path} is not UTF-8 text", why=str(error), where=str(path)
        ) from error


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError("AP865", "a line is not JSON", why=str(error), where=where) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UsageError(
            "AP865", "a line has no text", where=where, fix='write each line as {"text": "..."}'
        )
    return text


def _tokenizer_files(model: str) -> list[Path]:
    return [Path(model, name) for name in TOKENIZER_FILES if Path(model, name).is_file()]


def _encoder(model: str) -> tuple[Encode, list[int]]:
    """Return the function that tokenizes a text, and the tokens that end a text."""
    if Path(model).is_dir() and not _tokenizer_files(model):
        return lambda text: list(text.encode()), []
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(
            "AP865",
            f"the tokenizer of {model} cannot be loaded",
            why=str(error).splitlines()[0],
            where=model,
        ) from error
    end = tokenizer.eos_token_id
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        [] if end is None else [int(end)],
    )


def _write_tokens(
    path: Path, files: Iterable[Path], encoder: tuple[Encode, list[int]], tell: Progress
) -> None:
    """Write the largest token id, then all token ids, to a temporary file, renamed to ``path``."""
    encode, end = encoder
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    count, largest = 0, 0
    try:
        with beside.open("wb") as out:
            np.zeros(1, dtype=np.uint32).tofile(out)
            for tokens in _tokens_of(files, encode, end):
                count += len(tokens)
                largest = max(largest, 0, *tokens)
                np.asarray(tokens, dtype=np.uint32).tofile(out)
                tell(f"making the text tokens: {count} so far")
            out.seek(0)
            np.asarray([largest], dtype=np.uint32).tofile(out)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _tokens_of(files: Iterable[Path], encode: Encode, end: list[int]) -> Iterator[list[int]]:
    for file in files:
        with _decoding(file):
            for text in texts(file):
                yield from map(encode, text)
                yield end


def _digest(files: Iterable[Path], model: str) -> str:
    """Return a hash of the tokens' sources: files by path, size and time, tokenizer by content."""
    made = hashlib.sha256(f"tokens {FORMAT}\0{'' if Path(model).is_dir() else model}".encode())
    for file in files:
        found = file.stat()
        made.update(f"\0{file.resolve()}\0{found.st_size}\0{found.st_mtime_ns}".encode())
    for file in _tokenizer_files(model):
        made.update(f"\0{file.name}\0".encode() + file.read_bytes())
    return made.hexdigest()[:32]
