"""A worker of parameter servers: micro-batches of its part, pushes beside the backward, pulls.

In: global batches, of which a worker computes its part. Out: gradients at the servers, block by
block as the backward produces them; each block's forward waits for its own weights only. Under bsp
the next remaining worker takes over the parts of a lost worker: it gets the weights of the
unfinished iteration once more, so every iteration uses the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...planner.graph.graph import Graph
from ...planner.plan import ServerPlan
from ...planner.variants.parameter_servers import Shard
from ..data.rank_batch import microbatch_rows
from ..parameters.parameters import StageParameter, attach_gradient_hook
from ..step.executor import StageExecutor
from .channels import GRADIENT, LOSS, PULL, PUSH, READ_LOSS, Key, Request, Traffic

SHARED = -1
"""Number that stands for "no single block": parameters that several blocks use."""


class LostWorkers(Exception):  # noqa: N818 — a signal inside this file
    """Exception: workers are lost, and this worker has to take over their part of the batch."""


class ServerWorker:
    """Worker number ``index`` in training with parameter servers; ``executor`` runs the whole
    model."""

    def __init__(
        self,
        index: int,
        servers: ServerPlan,
        executor: StageExecutor,
        pieces: Mapping[Key, Sequence[Shard]],
        traffic: Traffic,
        graph: Graph,
    ) -> None:
        """Make the worker. ``graph`` has the shapes of a worker's share of the batch. ``pieces``
        are the shards of parameters by server and block, ``traffic`` carries gradients and
        weights."""
        self._graph = graph
        self.index, self.servers, self.executor = index, servers, executor
        self._pieces, self._traffic = pieces, traffic
        self._known = 0
        self._clock = 0
        self._blocks = sorted({block for _, block in pieces})
        self._have = dict.fromkeys(self._blocks, 0)
        self._batch: Mapping[str, Tensor] = {}
        self._part = index
        self._is_pushing = False
        self._waiting: dict[int, set[str]] = {}
        self._names: dict[int, set[str]] = {block: set() for block in self._blocks}
        for name, parameter in executor.parameters.items():
            if parameter.spec.requires_grad:
                self._names[_block(parameter)].add(name)
        for parameter in executor.parameters.values():
            attach_gradient_hook(parameter, self._arrived)
        for position, block in enumerate(executor.stage.blocks):
            if position in self._have:
                block.register_forward_pre_hook(self._waiter(position))

    @property
    def is_bsp(self) -> bool:
        return self.servers.consistency == "bsp"

    @property
    def is_first(self) -> bool:
        """Tell whether all workers with lower numbers are known to be lost."""
        return self.index == self._owner(0)

    def step(self, batch: Mapping[str, Tensor]) -> float:
        """Run one iteration on a global batch. Return the loss of the whole batch if workers run in
        lockstep (bsp) and this is the first worker, else the loss of this worker's part."""
        before, self._batch = self._batch, self._rows(batch)
        while True:
            try:
                losses = [self._run(part) for part in self._parts()]
                break
            except LostWorkers:
                self._take_over(before)
        self._clock += 1
        self._request()
        return self._whole_loss() if self.is_bsp and self.is_first else sum(losses)

    def _rows(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the rows that this worker reads: the global batch if workers run in lockstep
        (bsp), else its share of the rows, whose gradient makes an update of its own."""
        if self.is_bsp:
            return batch
        graph, count = self._graph, len(self.servers.workers)
        return {
            name: microbatch_rows(name, tensor, graph[name].spec, self.index, count)
            for name, tensor in batch.items()
        }

    def finish(self) -> None:
        """Wait for the weights after the last iteration, and fill the model with them."""
        while True:
            try:
                for block in self._blocks:
                    self._wait_for(block)
                return
            except LostWorkers:
                self._take_over(self._batch)

    def close(self) -> None:
        """Tell the servers that no more requests come."""
        self._traffic.flush()
        self._traffic.close()

    def take_gradients(self) -> None:
        """Fill the model's gradients with the whole gradient of the last update, from the
        servers."""
        self._traffic.forget_pulls()
        for home, block in self._pieces:
            self._traffic.pull(Request(GRADIENT, home, block, self._clock, self.index))
        for block in self._blocks:
            for parameter in self.executor.parameters.values():
                if _block(parameter) == block and parameter.gradient is None:
                    parameter.gradient = torch.zeros_like(parameter.local)
            self._wait_until_here(block)
            self._fill(block, gradients=True)

    def _parts(self) -> list[int]:
        """Return the numbers of the batch parts that this worker computes: its own and, if workers
        run in lockstep (bsp), the parts of lost workers that it takes over."""
        if not self.is_bsp:
            return [self.index]
        return [
            part for part in range(len(self.servers.workers)) if self._owner(part) == self.index
        ]

    def _owner(self, part: int) -> int:
        count = len(self.servers.workers)
        order = [(part + offset) % count for offset in range(count)]
        return next(worker for worker in order if not self._known >> worker & 1)

    def _run(self, part: int) -> float:
        """Run forward and backward of the micro-batches in batch part ``part``; return its share of
        the loss."""
        executor, shares = self.executor, self.servers.shares
        if not self.is_bsp:
            part, shares = 0, shares[:1]
        if SHARED in self._have:
            self._wait_for(SHARED)
        executor.steps_begun = self._clock
        executor.begin_step(self._batch)
        first = sum(shares[:part])
        self._part = part if self.is_bsp else self.index
        units = range(first, first + shares[part])
        for unit in units:
            executor.forward(unit, {})
            self._is_pushing = unit == units[-1]
            self._waiting = {block: set(names) for block, names in self._names.items()}
            executor.backward(unit, {}, last=self._is_pushing)
        self._is_pushing = False
        for block in reversed(self._blocks):  # blocks without a gradient, and shared ones
            if block in self._waiting:
                self._push(block)
        losses = [loss for unit in units if (loss := executor.loss(unit)) is not None]
        total = sum(float(loss) for loss in losses)
        if not self.is_bsp:
            return total / len(units)
        for home in range(len(self.servers.servers)):
            value = torch.tensor(total / executor.num_microbatches, dtype=torch.float64)
            self._traffic.push(Request(LOSS, home, 0, self._clock, part), value)
        return total / executor.num_microbatches

    def _arrived(self, parameter: StageParameter) -> None:
        """Push the gradients of a block to the servers once the gradients of all its parameters are
        there. Called for each ``parameter`` whose gradient a backward has computed."""
        block = _block(parameter)
        if not self._is_pushing or block == SHARED or block not in self._waiting:
            return
        self._waiting[block].discard(parameter.name)
        if not self._waiting[block]:
            self._push(block)

    def _push(self, block: int) -> None:
        del self._waiting[block]
        for (home, own), shards in self._pieces.items():
            if own == block:
                payload = torch.cat([self._gradient(shard) for shard in shards])
                self._traffic.push(Request(PUSH, home, block, self._clock, self._part), payload)

    def _gradient(self, shard: Shard) -> Tensor:
        parameter = self.executor.parameters[shard.parameter]
        gradient = parameter.gradient
        if gradient is None:
            return parameter.local.new_zeros(shard.size)
        return gradient.detach().reshape(-1)[shard.start : shard.stop]

    def _request(self) -> None:
        """Request from the servers the weights of the next iteration, in the order of first use."""
        for block in self._blocks:
            for home, own in self._pieces:
                if own == block:
                    self._traffic.pull(Request(PULL, home, block, self._clock, self.index))

    def _waiter(self, block: int) -> Callable[[nn.Module, object], None]:
        def wait(module: nn.Module, inputs: object) -> None:
            self._wait_for(block)

        return wait

    def _wait_for(self, block: int) -> None:
        """Wait for a block's weights of this iteration, and copy them into the model."""
        if self._have[block] != self._clock:
            self._wait_until_here(block)
            self._fill(block)
            self._have[block] = self._clock

    def _wait_until_here(self, block: int) -> None:
        keys = [key for key in self._pieces if key[1] == block]

        def is_here() -> bool:
            return all(self._traffic.has(key, self._clock) for key in keys)

        while not self._traffic.wait(is_here, self._known):
            self._learn()

    def _learn(self) -> None:
        """Record the workers reported lost. Raise LostWorkers if this worker has to take over parts
        of the batch from them."""
        before = self._parts()
        self._known |= self._traffic.lost
        if self._parts() != before:
            raise LostWorkers
        self._traffic.know(self._known)

    def _fill(self, block: int, *, gradients: bool = False) -> None:
        with torch.no_grad():
            for key, shards in self._pieces.items():
                if key[1] != block:
                    continue
                values, start = self._traffic.arrived[key][1], 0
                for shard in shards:
                    parameter = self.executor.parameters[shard.parameter]
                    memory = parameter.gradient if gradients else parameter.local
                    assert memory is not None
                    stop = start + shard.size
                    memory.view(-1)[shard.start : shard.stop].copy_(values[start:stop])
                    start = stop
                if not gradients:
                    for shard in shards:
                        self.executor.parameters[shard.parameter].refresh()

    def _take_over(self, batch: Mapping[str, Tensor]) -> None:
        """Compute again this worker's parts of the previous iteration, now with the parts of lost
        workers, with the weights of that iteration. ``batch`` is the batch of that iteration."""
        now, self._batch = self._batch, batch
        self._clock -= 1
        self._traffic.forget_pulls()
        self._traffic.know(self._known)
        self._request()
        self._have = dict.fromkeys(self._blocks, -1)
        for part in self._parts():
            self._run(part)  # a server ignores pushes that it has had
        self._traffic.flush()
        self._clock += 1
        self._batch = now
        self._traffic.forget_pulls()
        self._request()

    def _whole_loss(self) -> float:
        clock = self._clock - 1
        while True:
            self._traffic.pull(Request(READ_LOSS, 0, -2, clock, self.index))
            try:
                while not self._traffic.wait(
                    lambda: self._traffic.loss(clock) is not None, self._known
                ):
                    self._learn()
            except LostWorkers:
                self._take_over(self._batch)
                continue
            loss = self._traffic.loss(clock)
            assert loss is not None
            return loss


def _block(parameter: StageParameter) -> int:
    return SHARED if parameter.block is None else parameter.block
