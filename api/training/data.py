"""Data of ``autoparallel run``: each rank's inputs by step, and the position in the data.

In: a target with or without ``build_data``, and the trainer. Out: this rank's inputs, step by step,
and the position in the data as a ``state_dict``. Without ``build_data`` inputs are random.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.errors import UsageError
from autoparallel.runtime.data.batches import RankInputs
from autoparallel.runtime.messages.shared_objects import SharedCount, gather_values
from autoparallel.runtime.step.trainer import RankTrainer
from autoparallel.target.target import Target
from autoparallel.training.loaders import has_rows, skip_batches


class TrainingData:
    """Endless iterator over a rank's training inputs; at the end of the data it starts again.

    The target's ``build_data(rank, world)`` is called on the ranks that need data, with the index
    of the rank's part of a batch and the number of parts. It yields parts or whole global batches.
    """

    def __init__(
        self,
        trainer: RankTrainer,
        target: Target,
        *,
        seed: int,
        progress: Callable[..., None] = lambda what, waits_for=(): None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Set up the iterator. ``progress`` informs the watchdog, ``tell`` prints for the user."""
        self._trainer, self._target, self._seed = trainer, target, seed
        self._progress, self._tell = progress, tell
        self._place = trainer.batches.place
        self._consumed = 0
        self._pass = 0
        self._source: Any = None
        self._saved: Any = None
        self._batches: Iterator[RankInputs] | None = None
        teller = None if target.build_data is None else trainer.batches.teller
        self._count = None if teller is None else SharedCount(teller)

    def __iter__(self) -> TrainingData:
        return self

    def __next__(self) -> RankInputs:
        """Return the inputs of the next step.

        Raises UsageError AP118 if ``build_data`` yields no batch.
        """
        if self._place is not None:
            self._progress(f"loading batch {self._consumed + 1}")
        if self._batches is None:
            self._batches = self._from(self._consumed)
        inputs = next(self._batches)
        if self._count is not None:
            teller = self._count.source
            self._progress(f"waiting for the batch of rank {teller}", (teller,))
            rows = None if self._place is None else self._trainer.batches.rows_of(inputs)
            told = self._count(rows)
            if rows is None:
                inputs.global_rows = told
        self._consumed += 1
        return inputs

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches read, and the state of each rank's source that has a state.

        Collective over all ranks; the result is the same on each.
        """
        has_state = hasattr(self._source, "state_dict")
        own = (self._place, self._source.state_dict() if has_state else None)
        found = {
            f"{place[0]}/{place[1]}": state
            for place, state in gather_values(own)
            if place is not None and state is not None
        }
        return {"batches": self._consumed, "pass": self._pass, "seed": self._seed, "sources": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``; ``{"batches": n}`` suffices.

        Stored states of data sources are used if the batch has as many parts as when they were
        saved; otherwise ``n`` batches are skipped.
        """
        self._consumed = int(state["batches"])
        self._pass = int(state.get("pass", 0))
        self._seed = int(state.get("seed", self._seed))
        place = "" if self._place is None else f"{self._place[0]}/{self._place[1]}"
        self._saved = state.get("sources", {}).get(place)
        self._batches = None

    def go_on_from(self, batches: int) -> None:
        """Set the position to ``batches`` batches, unless a loaded state has set it already."""
        self._consumed = self._consumed or batches

    def _from(self, start: int) -> Iterator[RankInputs]:
        if self._target.build_data is None:
            return self._random(start)
        if self._place is None:
            return (RankInputs() for _ in itertools.count())
        return self._passes(start)

    def _random(self, start: int) -> Iterator[RankInputs]:
        trainer = self._trainer
        graph = trainer.program.graph.with_batch_size(trainer.plan.model.global_batch)
        for step in itertools.count(start):
            yield RankInputs(random_batch(graph, seed=self._seed + step))

    def _passes(self, start: int) -> Iterator[RankInputs]:
        """Yield the batches from number ``start`` on, over endless passes (epochs)."""
        saved, self._saved = self._saved, None
        at = start if saved is not None or self._takes("start") else 0
        self._pass = self._pass if at else 0
        while True:
            before = at
            batches, at = self._open(at, start, saved)
            saved = None
            for batch in batches:
                at += 1
                if at > start:
                    yield self._trainer.batches.named(batch)
                elif at % 100 == 0:
                    self._progress(f"going through batch {at} of {start} that were trained on")
            if at == before:
                fix = "take start modulo the number of batches" if self._takes("start") else ""
                raise UsageError(
                    "AP118", "build_data returns no batch", where=self._target.name, fix=fix
                )
            self._pass += 1

    def _open(self, at: int, start: int, saved: Any) -> tuple[Iterable[Any], int]:
        """Begin a pass (epoch) at batch ``at``; return its batches and the number of the first.

        The source gets its state ``saved``, or skips batches before ``start`` if it can. An order
        drawn from torch's generator is the same on every rank and in every run with the same seed.
        """
        torch.manual_seed(self._seed + self._pass)
        data = self._source = self._build(at)
        if saved is not None:
            data.load_state_dict(saved)
        elif at < start and isinstance(data, DataLoader) and has_rows(data):
            num_skipped = min(start - at, len(data))
            return skip_batches(data, num_skipped), at + num_skipped
        elif at == 0 and start:
            self._tell(
                f"going through {start} batches that were trained on; build_data(rank, world, "
                "start) or an iterable with state_dict and load_state_dict avoids it"
            )
        return data, at

    def _build(self, start: int) -> Any:
        """Call ``build_data`` for this rank's part, with the keyword arguments that it accepts."""
        model, build = self._trainer.plan.model, self._target.build_data
        assert build is not None
        assert self._place is not None
        known = {
            "global_batch": model.global_batch,
            "seq": model.seq,
            "seed": self._seed,
            "start": start,
        }
        taken = {name: value for name, value in known.items() if self._takes(name)}
        return build(*self._place, **{n: value for n, value in taken.items() if value is not None})

    def _takes(self, name: str) -> bool:
        assert self._target.build_data is not None
        return name in inspect.signature(self._target.build_data).parameters
