"""A process group that promises what NCCL on CUDA promises and no more, over gloo: ``strict``.

1. The messages from one rank to another match in the order in which they are given; tags are
   ignored. Sends and receives of a communicator are one sequence, as in NCCL.
2. What a receive or a collective fills holds nonsense until ``wait`` was called.
3. A posted receive, and a collective, holds up all that its rank does after it until it is served.
4. The first operation of a communicator takes all of its members.
5. Objects do not travel on it.
6. The memory of a send is in use until ``wait`` was called: writing to it before is an error, and
   ``is_completed`` says no.

Where a rule makes a hang of a fault, it is an error after ``PATIENCE``. The group's own copies are
counted by no mode that its callers have entered. ``begun`` says how many communicators a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

PATIENCE = timedelta(seconds=30)
NAME = "strict"


class StrictWork(dist.Work):
    """An operation that is over for this rank's thread, but not seen to be until ``wait``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class StrictGroup(dist.ProcessGroup):
    """See the module."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=PATIENCE)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._inner._set_default_backend(kind)
        self._inner._register_backend(torch.device("cpu"), kind, gloo)
        self._began = False
        self._sends: list[Any] = []

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _begin(self) -> None:
        """Rule 4: all members come to the first operation."""
        if not self._began:
            self._began = True
            _BEGUN.append(self)
            self._inner.barrier().wait()

    def _collective(
        self, outputs: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Any]
    ) -> StrictWork:
        """Runs on copies of the outputs, which get their values when they are waited for."""
        self._begin()
        made = [_copy(each) for each in outputs]
        with _disable_current_modes():
            run(made).wait()
            for each in outputs:
                _spoil(each)

        def finish() -> None:
            with _disable_current_modes():
                for each, value in zip(outputs, made, strict=True):
                    each.copy_(value)

        return StrictWork(finish)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:
        return self._collective(tensors, lambda made: self._inner.allreduce(list(made), opts))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp

        def run(made: Sequence[Tensor]) -> Any:
            works = [self._inner.allreduce([each], plain) for each in made]
            return _All(works)

        return self._collective(tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> StrictWork:
        return self._collective(tensors, lambda made: self._inner.broadcast(list(made), opts))

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> StrictWork:
        (parts,), given = outputs, [_copy(each) for each in inputs]
        return self._collective(
            parts, lambda made: self._inner.allgather([list(made)], given, *_options(opts))
        )

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StrictWork:
        copy = _copy(given)
        return self._collective(
            [output],
            lambda made: self._inner.all_gather_single(made[0], copy, *_options(opts)),
        )

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> StrictWork:
        copy = _copy(given)
        return self._collective(
            [output],
            lambda made: self._inner.reduce_scatter_single(made[0], copy, *_options(opts)),
        )

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _All([self.all_gather_single(o, i, opts) for o, i in pairs])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> StrictWork:
        copy = _copy(given)
        return self._collective(
            [output],
            lambda made: self._inner.all_to_all_single(
                made[0], copy, output_sizes, input_sizes, *_options(opts)
            ),
        )

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> StrictWork:
        given = [[_copy(each) for each in parts] for parts in inputs]
        return self._collective(
            outputs, lambda made: self._inner.scatter(list(made), given, *_options(opts))
        )

    def barrier(self, opts: Any = None) -> StrictWork:
        return self.allreduce([torch.ones(1)], dist.AllreduceOptions())

    def send(self, tensors: list[Tensor], target: int, tag: int) -> StrictWork:
        self._begin()
        (given,) = tensors
        copy = _copy(given)
        with _disable_current_modes():
            work = self._inner.send([copy], target, 0)
        self._sends.append((work, copy))

        def finish() -> None:
            with _disable_current_modes():
                same = torch.equal(_bytes(given), _bytes(copy))
            assert same, "a message was written to under way"

        return StrictWork(finish)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> StrictWork:
        return self._collective(tensors, lambda made: self._inner.recv(list(made), source, 0))


class _All(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True


_BEGUN: list[StrictGroup] = []


def begun() -> int:
    """How many groups of several ranks this process has begun an operation of."""
    return sum(group.size() > 1 for group in _BEGUN)


def _copy(tensor: Tensor) -> Tensor:
    with _disable_current_modes():
        return tensor.detach().clone()


def _options(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _spoil(tensor: Tensor) -> None:
    """Overwrites a tensor with values that a test notices: NaN, True, or the integer 113."""
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(True if tensor.dtype == torch.bool else 113)


def register() -> None:
    """Makes ``strict`` known to this process, whose objects then travel on other groups only."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, StrictGroup, devices=["cpu"])
    module = dist.distributed_c10d
    device_of = module._get_object_coll_device

    def refusing(group: Any = None) -> str:
        found = module._get_default_group() if group is None else group
        if isinstance(found, StrictGroup):
            raise RuntimeError("objects do not travel on a communicator of GPUs")
        return device_of(group)

    module._get_object_coll_device = refusing
    one_by_one = dist.batch_isend_irecv

    def together(operations: list[dist.P2POp]) -> list[Any]:
        """As between ncclGroupStart and ncclGroupEnd: none holds up another one."""
        group = operations[0].group or module._get_default_group()
        if not isinstance(group, StrictGroup):
            return one_by_one(operations)
        ordered = sorted(operations, key=lambda each: each.op is not dist.isend)
        return [_All([each.op(each.tensor, each.peer, each.group) for each in ordered])]

    dist.batch_isend_irecv = together
