"""The agent of one host: starts its ranks, and starts them again when ranks or hosts fail.

In: a job, and how many hosts there are. Out: the function's value on this host's first rank, or the
error of the run. It is torch's elastic agent, with the processes of our own launcher: hosts meet
(``rendezvous``), a failed rank or a host that comes or goes makes all meet again, and after
``max_restarts`` failures the run ends. torch does not notice a host that is gone while its ranks'
connections stay open; so agents also hear each other's heartbeats, and watch the store.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousTimeoutError,
)

from ...planner.errors import AutoparallelError, MachineError, UsageError, WorkerError
from ..messages.failure_store import SharedStore
from .launch import Workers, can_mend, signals_raise, tell_restart
from .process import RESULT, Job
from .rendezvous import (
    Hosts,
    StoreWatch,
    interface_of,
    make_handler,
    open_store,
    own_address,
    parse_endpoint,
)

BEAT_SECONDS = 1.0
LOST_SECONDS = 15.0
"""Time without a heartbeat of an agent after which its host counts as lost; torch's rendezvous uses
the same."""
LEAVING_SECONDS = 3.0
"""Time for which the host that serves the store stays up after the other hosts have ended."""
JOB, ROUNDS, BEATS = "autoparallel/job", "autoparallel/rounds", "autoparallel/beats"


def launch_on_hosts(
    job: Job,
    hosts: Hosts,
    *,
    num_local: int,
    environment: Mapping[str, str],
    max_restarts: int,
    finishes: bool = False,
) -> Any:
    """Run ``job`` on ``num_local`` ranks of this host, and on as many ranks of each other host;
    return the value of this host's first rank.

    If ``finishes``, a first SIGTERM to any host ends the ranks of all hosts when they have finished
    their step.

    Raises the error of the first rank that failed by itself, UsageError AP157 where hosts were
    given different runs, MachineError AP414 where the endpoint cannot be reached, AP415 where not
    enough hosts come, and AP416 where the host that keeps the store is gone.
    """
    endpoint = parse_endpoint(hosts.endpoint)
    address = own_address(endpoint)
    store, is_kept_here = open_store(endpoint, hosts.join_seconds)
    _check_same_job(store, job, hosts)
    interface = interface_of(address)
    names = () if interface is None else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    shared = {**{name: str(interface) for name in names}, **environment}
    watch = StoreWatch(LOST_SECONDS, lambda: agent.end_without_store(hosts))
    handler = make_handler(hosts, store, endpoint, watch.asking)
    spec = WorkerSpec(
        role="ranks",
        local_world_size=num_local,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    with tempfile.TemporaryDirectory(prefix="autoparallel-") as folder:
        alone = replace(job, folder=folder, is_alone=False)
        agent = HostAgent(spec, alone, shared, store, watch.asking)
        with watch:
            try:
                with signals_raise(agent.ask if finishes else None):
                    found = _run(agent, hosts)
            except AutoparallelError:
                handler.shutdown()  # a host that is told to end leaves the run to the others
                if is_kept_here:
                    time.sleep(LEAVING_SECONDS)  # so that they hear of it
                raise
        if is_kept_here:
            time.sleep(LEAVING_SECONDS)
        return found


def _run(agent: HostAgent, hosts: Hosts) -> Any:
    """Run the agent to its end, and return the value of this host's first rank. Raises the last
    failure, AP415 if too few hosts come, AP416 if the store is gone, AP825 if another host ended
    the run."""
    try:
        result = agent.run()
    except RendezvousTimeoutError as error:
        raise MachineError(
            "AP415",
            f"fewer than {hosts.least} hosts came to {hosts.endpoint}",
            why=f"this host waited {hosts.join_seconds:g} s",
            fix=f"start the same command on {hosts.least} hosts; --join-timeout waits longer",
        ) from error
    except RendezvousClosedError:
        result = None
    except (RendezvousError, DistError) as error:
        raise _without_store(hosts, str(error).splitlines()[0]) from error
    if agent.error is not None and (result is None or result.is_failed()):
        raise agent.error
    if result is None:
        raise WorkerError(
            "AP825", "another host has ended the run", fix="that host says why; start all again"
        )
    return agent.value()


def _without_store(hosts: Hosts, why: str) -> MachineError:
    return MachineError(
        "AP416",
        f"the host of the rendezvous endpoint {hosts.endpoint} is gone",
        why=why,
        fix="start the run again on all hosts with --resume, or with an endpoint that stays",
    )


def _check_same_job(store: Any, job: Job, hosts: Hosts) -> None:
    """Raise UsageError AP157 if another host was given another job, or another --nnodes."""
    own = json.dumps(
        {"hosts": [hosts.least, hosts.most], "entry": job.entry, "run": job.arguments},
        sort_keys=True,
    )
    first = store.compare_set(JOB, "", own).decode()
    if first == own:
        return
    one, other = json.loads(own), json.loads(first)
    if one["hosts"] != other["hosts"]:
        named = ["{}:{}".format(*each["hosts"]) for each in (one, other)]
        why = f"--nnodes is {named[0]} here and {named[1]} there"
    else:
        names = [name for name in one["run"] if one["run"][name] != other["run"].get(name)]
        why = f"{', '.join(names) or 'the command'} differ"
    raise UsageError(
        "AP157",
        "this host was given another run than the first one",
        why=why,
        fix="give every host the same command, and the same plan at the same path",
    )


class HostAgent(SimpleElasticAgent):
    """torch's elastic agent for one host: it starts, watches and restarts the host's ranks.
    ``error`` is their last failure."""

    def __init__(
        self,
        spec: WorkerSpec,
        job: Job,
        environment: Mapping[str, str],
        store: Any,
        asking: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Make the agent. Each of its requests to ``store`` is made in a context ``asking()``,
        which notices if the store does not answer."""
        super().__init__(spec)
        self._asking = asking
        self.error: AutoparallelError | None = None
        self._job = job
        self._environment = environment
        self._hosts_store = store
        self._round = 0
        self._workers: Workers | None = None
        self._peers: Peers | None = None

    def value(self) -> Any:
        """Return the value that the job's function returned on this host's first rank."""
        first = self._worker_group.workers[0].global_rank
        return json.loads((self._folder() / RESULT.format(first)).read_text())

    def ask(self) -> bool:
        """Pass a SIGTERM of this process on to its ranks if it is the first, and return True; they
        end after their step. Return False for a later SIGTERM."""
        return self._workers is not None and self._workers.ask()

    def end_without_store(self, hosts: Hosts) -> None:
        """End the ranks and this process because the store is gone: the main thread would wait for
        its answer forever. Prints the error of a rank that failed by itself, else MachineError
        AP416."""
        error = self.error
        if self._workers is not None:
            failed = {rank: code for rank, code in self._workers.codes().items() if code}
            if error is None and failed:
                error = self._workers.error(failed)
            self._workers.end()
        if error is None:
            error = _without_store(hosts, f"its store has not answered for {LOST_SECONDS:g} s")
        print(error, file=sys.stderr, flush=True)
        shutil.rmtree(self._job.folder, ignore_errors=True)
        os._exit(error.exit_code)

    def _folder(self) -> Path:
        return Path(self._job.folder, str(self._round))

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        met: Any = worker_group.store
        rank, num_hosts = worker_group.group_rank, worker_group.group_world_size
        assert rank is not None
        assert num_hosts is not None
        if rank == 0:
            met.set(ROUNDS, str(self._hosts_store.add(ROUNDS, 1)))
        self._round = int(met.get(ROUNDS))
        self._peers = Peers(met, rank, num_hosts, time.monotonic)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        folder = self._folder()
        folder.mkdir(mode=0o700)
        path = folder / "job.json"
        path.write_text(json.dumps(asdict(replace(self._job, folder=str(folder)))))
        spec = worker_group.spec
        environment = {
            **self._environment,
            "WORLD_SIZE": str(worker_group.workers[0].world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._round - 1),
            "PYTHONUNBUFFERED": "1",
        }
        self._workers = Workers(
            path,
            environment,
            spec.local_world_size,
            first_rank=worker_group.workers[0].global_rank,
            failures=SharedStore(environment),
        )
        return self._workers.start()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._workers is not None
        assert self._peers is not None
        codes = self._workers.codes()
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            self._fail(self._workers.error(self._workers.others(failed)))
            return _failed(failed)
        if all(code == 0 for code in codes.values()):
            return RunResult(WorkerState.SUCCEEDED, dict.fromkeys(codes))
        with self._asking():
            lost = self._peers.lost()
        if lost:
            self._fail(_lost_hosts(lost), counts=False)
            return _failed(dict.fromkeys(codes, 1))
        return RunResult(WorkerState.HEALTHY)

    def _fail(self, error: AutoparallelError, *, counts: bool = True) -> None:
        """Record ``error``, and set how many restarts are left: none if a restart cannot help, one
        less if the failure ``counts``, else as many as before."""
        self.error = error
        most = self._worker_group.spec.max_restarts
        if not can_mend(error):
            self._remaining_restarts = 0
        elif not counts or self._has_lost_a_host():
            self._remaining_restarts += 1
            sys.stderr.write(f"{error}\nautoparallel: the hosts meet again\n")
        elif self._remaining_restarts > 0:
            tell_restart(error, most - self._remaining_restarts + 1, most)

    def _has_lost_a_host(self) -> bool:
        """Return whether the ranks failed because another host is gone. If they report a lost
        connection, wait until that host's heartbeat is overdue."""
        assert self._peers is not None
        is_consequence = self.error is not None and self.error.code in ("AP820", "AP821")
        deadline = time.monotonic() + LOST_SECONDS + 2 * BEAT_SECONDS
        while is_consequence and time.monotonic() < deadline:
            with self._asking():
                lost = self._peers.lost()
            if lost:
                return True
            if self._worker_group.spec.rdzv_handler.num_nodes_waiting() > 0:
                return False  # all hosts are there, and one of them waits for this one
            time.sleep(BEAT_SECONDS / 2)
        return False

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._workers is not None:
            self._workers.end()


class Peers:
    """Heartbeats between the agents of hosts that run together: each agent increments a number of
    its own in the store and reads the others'."""

    def __init__(self, store: Any, rank: int, num_hosts: int, clock: Callable[[], float]) -> None:
        self._store, self._rank, self._clock = store, rank, clock
        self._beats = 0
        self._sent = -BEAT_SECONDS
        self._heard = {peer: ("", clock()) for peer in range(num_hosts) if peer != rank}

    def lost(self) -> tuple[int, ...]:
        """Send this host's heartbeat if due; return the numbers of the hosts that have sent none
        for ``LOST_SECONDS``."""
        now = self._clock()
        if now - self._sent < BEAT_SECONDS:
            return self._silent(now)
        self._sent = now
        self._beats += 1
        self._store.set(f"{BEATS}/{self._rank}", str(self._beats))
        for peer, (before, _) in self._heard.items():
            key = f"{BEATS}/{peer}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if beat != before:
                self._heard[peer] = (beat, now)
        return self._silent(now)

    def _silent(self, now: float) -> tuple[int, ...]:
        return tuple(p for p, (_, heard) in self._heard.items() if now - heard > LOST_SECONDS)


def _failed(codes: Mapping[int, int]) -> RunResult:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=0, exitcode=code, error_file="")
        for rank, code in codes.items()
    }
    return RunResult(WorkerState.FAILED, failures=failures)


def _lost_hosts(lost: tuple[int, ...]) -> WorkerError:
    names = ", ".join(map(str, lost))
    return WorkerError(
        "AP826",
        f"host {names} of the run is lost",
        why=f"its agent has not been heard for {LOST_SECONDS:g} s",
    )
