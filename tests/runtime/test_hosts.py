"""Runs on several hosts: each starts its own ranks, which restart together or go on with fewer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from forked_interpreters import ForkedInterpreter
from host_spaces import HostSpace, host_spaces, skip_without_spaces
from test_restarts import KILLED, MODEL, STEPS

from autoparallel.__main__ import run_command
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.options.hosts import parse_hosts, ranks_per_host
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced
from autoparallel.planning.plan_files import load_plan, save_plan
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.launch.agent import LOST_SECONDS, Peers
from autoparallel.runtime.launch.membership import join_as
from autoparallel.runtime.launch.process import Worker
from autoparallel.runtime.launch.rendezvous import open_store, own_address
from autoparallel.target.load import load_target

ALONE = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
    "OMP_NUM_THREADS": "1",
}
PORT = 29517
SAVING = ("--steps", str(STEPS), "--seed", "3", "--save", "run", "--save-every", "2")


def planned(folder: Path, cluster: str, forced: Forced, *, rows: int = 12) -> Path:
    """A plan of the model with dropout in ``folder``, whose first run kills a rank if asked to."""
    for name, text in (("dropout_model.py", MODEL.read_text()), ("killed_model.py", KILLED)):
        (folder / name).write_text(text)
    options = PlanOptions(global_batch=rows, profile="analytic", forced=forced)
    plan = make_plan(load_target(str(folder / "dropout_model.py")), cluster, options)
    for name in ("dropout_model", "killed_model"):
        named = replace(plan.model, target=str(folder / f"{name}.py"))
        save_plan(replace(plan, model=named), folder / f"{name}.json")
    return folder


def losses(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


class Agents:
    """``autoparallel`` on several hosts, in one folder that they share."""

    def __init__(self, folder: Path, spaces: Sequence[HostSpace] = ()) -> None:
        self.folder, self.spaces = folder, spaces
        self.address = spaces[0].address if spaces else "127.0.0.1"
        self.processes: list[Any] = []

    def start(self, host: int, *arguments: str, port: int = PORT) -> None:
        command = [
            sys.executable,
            "-m",
            "autoparallel",
            *arguments,
            "--rdzv-endpoint",
            f"{self.address}:{port}",
        ]
        number = len(self.processes)
        with (
            (self.folder / f"{number}.out").open("wb") as out,
            (self.folder / f"{number}.err").open("wb") as err,
        ):
            how: Mapping[str, Any] = {
                "env": ALONE,
                "cwd": str(self.folder),
                "stdout": out,
                "stderr": err,
            }
            if self.spaces:
                process: Any = subprocess.Popen([*self.spaces[host].prefix, *command], **how)
            else:
                process = ForkedInterpreter(command, **how)
        self.processes.append(process)

    def codes(self, timeout_seconds: float = 400.0) -> list[int]:
        deadline = time.monotonic() + timeout_seconds
        return [each.wait(max(0.1, deadline - time.monotonic())) for each in self.processes]

    def said(self, number: int, name: str = "err") -> str:
        return (self.folder / f"{number}.{name}").read_text()

    def all_said(self) -> str:
        return "".join(self.said(number) for number in range(len(self.processes)))

    def wait_for_words(self, words: str, timeout_seconds: float = 400.0) -> None:
        """Until a host has written them to stderr."""
        deadline = time.monotonic() + timeout_seconds
        while words not in self.all_said():
            assert time.monotonic() < deadline, self.all_said()
            time.sleep(0.1)

    def wait_for_step(self, step: int, timeout_seconds: float = 400.0) -> None:
        """Until the metrics have this step."""
        path = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + timeout_seconds
        while not (path.exists() and f'"step": {step},' in path.read_text()):
            assert time.monotonic() < deadline, self.all_said()
            time.sleep(0.1)


@contextmanager
def agents(folder: Path, spaces: Sequence[HostSpace] = ()) -> Iterator[Agents]:
    found = Agents(folder, spaces)
    try:
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.wait(10.0)


def wait_for_listener(port: int, timeout_seconds: float = 60.0) -> None:
    """Waits until a process listens at a port of this host."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return


def sums(worker: Worker, most: int) -> dict[str, float]:
    """The ranks' sum; the last rank dies in the first attempts."""
    join_as(worker, parse_cluster(f"cpu:{worker.world_size}"))
    if worker.restarts < most and worker.rank == worker.world_size - 1:
        os._exit(9)
    value = torch.full((), worker.rank + 1.0)
    dist.all_reduce(value)
    return {"sum": value.item(), "restarts": worker.restarts}


def refuses(worker: Worker, most: int) -> None:
    if worker.rank == 0:
        raise UsageError("AP118", "no batch")
    time.sleep(60)


HOST = """
import json, os, sys
from autoparallel.planner.errors import AutoparallelError
from autoparallel.runtime.launch.agent import launch_on_hosts
from autoparallel.runtime.launch.process import Job
from autoparallel.runtime.launch.rendezvous import Hosts

def main(entry, port):
    job = Job(f"test_hosts:{entry}", {"most": 1}, "", 60.0, tuple(sys.path))
    hosts = Hosts(2, 2, f"127.0.0.1:{port}", 60.0)
    return launch_on_hosts(job, hosts, num_local=2, environment=os.environ, max_restarts=1)

if __name__ == "__main__":  # not in the processes that are forked
    try:
        print(json.dumps(main(*sys.argv[1:])), flush=True)
    except AutoparallelError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
"""


def run_hosts(folder: Path, entry: str, port: int) -> tuple[list[int], Agents]:
    """``entry`` on two hosts of two ranks: exit codes, and what they wrote."""
    (folder / "host.py").write_text(HOST)
    environment = {**ALONE, "PYTHONPATH": os.pathsep.join(sys.path)}
    hosts = Agents(folder)
    for number in range(2):
        with (
            (folder / f"{number}.out").open("wb") as out,
            (folder / f"{number}.err").open("wb") as err,
        ):
            hosts.processes.append(
                ForkedInterpreter(
                    [sys.executable, str(folder / "host.py"), entry, str(port)],
                    env=environment,
                    cwd=str(folder),
                    stdout=out,
                    stderr=err,
                )
            )
    try:
        return hosts.codes(), hosts
    finally:
        for process in hosts.processes:
            process.kill()
            process.wait(10.0)


def test_the_ranks_of_all_hosts_start_again_together(tmp_path: Path) -> None:
    codes, hosts = run_hosts(tmp_path, "sums", PORT + 5)
    assert codes == [0, 0], hosts.all_said()
    for number in range(2):
        assert json.loads(hosts.said(number, "out")) == {"sum": 10.0, "restarts": 1}
    assert "rank 3 of 4 exited with code 9" in hosts.all_said()
    assert "autoparallel: restart 1 of 1" in hosts.all_said()


def test_an_error_that_no_restart_mends_ends_all_hosts(tmp_path: Path) -> None:
    codes, hosts = run_hosts(tmp_path, "refuses", PORT + 6)
    assert 2 in codes
    assert 0 not in codes
    assert "error[AP118]: no batch" in hosts.all_said()
    assert "autoparallel: restart" not in hosts.said(codes.index(2))


def test_a_host_that_is_silent_is_lost() -> None:
    """Derived by hand: host 1 beats until second 4, and is lost 15 seconds later."""
    store, now = dist.HashStore(), [0.0]
    mine, other = (Peers(store, rank, 3, lambda: now[0]) for rank in range(2))
    third = Peers(store, 2, 3, lambda: now[0])
    for second in range(30):
        now[0] = float(second)
        third.lost()
        if second <= 4:
            other.lost()
        assert mine.lost() == ((1,) if second > 4 + LOST_SECONDS else ())


@pytest.mark.slow
def test_two_hosts_start_their_ranks_again_and_go_on_together(tmp_path: Path) -> None:
    """Rank 1, which is alone on its host, is killed while it makes its fourth batch."""
    planned(tmp_path, "2x1xcpu", Forced(dp=2, zero=1))
    with agents(tmp_path) as hosts:
        for host in range(2):
            hosts.start(
                host,
                "run",
                "killed_model.json",
                *SAVING,
                "--nnodes",
                "2",
                "--max-restarts",
                "1",
                "--metrics",
                "metrics.jsonl",
            )
        assert hosts.codes() == [0, 0], hosts.all_said()
        err = hosts.all_said()
    assert "rank 1 of 2 died" in err
    assert "autoparallel: restart 1 of 1" in err
    assert err.count("autoparallel: the run goes on after step 2, from ") == 1
    done = run_command_in(
        tmp_path, "run", "dropout_model.json", *SAVING[:4], "--metrics", "unbroken.jsonl"
    )
    assert done == 0
    assert losses(tmp_path / "metrics.jsonl") == losses(tmp_path / "unbroken.jsonl")


def run_command_in(folder: Path, *arguments: str) -> int:
    from commands import run_python

    done = run_python("-m", "autoparallel", *arguments, folder=folder, environment=ALONE)
    assert done.returncode == 0, done.stderr
    return done.returncode


def test_the_store_listens_at_the_endpoint_alone() -> None:
    store, is_kept_here = open_store(("127.0.0.1", PORT + 1), 5.0)
    assert is_kept_here
    found = [
        each.laddr.ip
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == store.port
    ]
    assert found == ["127.0.0.1"]
    other, is_kept_here = open_store(("127.0.0.1", PORT + 1), 5.0)
    assert not is_kept_here
    store.set("key", "value")
    assert other.get("key") == b"value"
    assert own_address(("127.0.0.1", PORT)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--nnodes", "2"], 2, "--nnodes needs --rdzv-endpoint"),
        (["--rdzv-endpoint", "h:1"], 2, "--rdzv-endpoint needs --nnodes"),
        (["--nnodes", "0", "--rdzv-endpoint", "h:1"], 2, "neither N nor MIN:MAX"),
        (["--nnodes", "1:2", "--rdzv-endpoint", "127.0.0.1:9"], 2, "without --elastic"),
        (["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1"], 2, "is not HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "0.0.0.0:9"], 2, "is no address of a host"),
        (
            ["--nnodes", "3", "--rdzv-endpoint", "127.0.0.1:9"],
            2,
            "the plan is for 2 hosts with 2 devices, and --nnodes says 3",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", "192.0.2.1:9", "--join-timeout", "1"],
            5,
            "error[AP414]: the rendezvous endpoint 192.0.2.1:9 cannot be reached",
        ),
        (
            ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{PORT + 2}", "--join-timeout", "2"],
            5,
            f"error[AP415]: fewer than 2 hosts came to 127.0.0.1:{PORT + 2}",
        ),
    ],
)
def test_what_hosts_cannot_do_is_told(
    arguments: list[str],
    code: int,
    words: str,
    plan: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(plan)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run_command(["run", "dropout_model.json", "--steps", "1", *arguments]) == code
    assert words in capfd.readouterr().err


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(tmp_path_factory.mktemp("plans"), "2x1xcpu", Forced(dp=2))


def test_a_plan_of_unlike_hosts_or_a_target_is_refused(
    plan: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found: Plan = load_plan(plan / "dropout_model.json")
    hosts = parse_hosts("2", f"127.0.0.1:{PORT}")
    assert hosts is not None
    assert ranks_per_host(found, hosts) == 1
    first, second = found.cluster.hosts
    uneven = replace(found.cluster, hosts=(first, replace(second, num_devices=2)))
    with pytest.raises(UsageError, match="AP156"):
        ranks_per_host(replace(found, cluster=uneven), hosts)
    arguments = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{PORT}"]
    assert run_command(["run", str(MODEL), *arguments]) == 2
    assert "a target cannot be planned on several hosts" in capfd.readouterr().err


def test_a_host_with_another_command_is_told_so(plan: Path) -> None:
    with agents(plan) as hosts:
        common = ("run", "dropout_model.json", "--nnodes", "2", "--join-timeout", "20")
        hosts.start(0, *common, "--steps", "3", port=PORT + 3)
        wait_for_listener(PORT + 3)
        hosts.start(1, *common, "--steps", "4", port=PORT + 3)
        assert hosts.processes[1].wait(60.0) == 2
        assert "error[AP157]" in hosts.said(1)
        assert "why: steps differ" in hosts.said(1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hosts_with_addresses_of_their_own_train_and_verify(tmp_path: Path) -> None:
    """Two hosts of two ranks; nothing listens but at the host's own address and loopback."""
    skip_without_spaces()
    planned(tmp_path, "2x2xcpu", Forced(dp=2, tp=2, zero=1))
    with host_spaces(2) as spaces, agents(tmp_path, spaces) as hosts:
        for host in range(2):
            hosts.start(
                host,
                "run",
                "killed_model.json",
                *SAVING,
                "--nnodes",
                "2",
                "--max-restarts",
                "1",
                "--metrics",
                "metrics.jsonl",
            )
        hosts.wait_for_step(1)
        for space in spaces:
            found = subprocess.run(
                [*space.prefix, sys.executable, "-c", LISTENING],
                capture_output=True,
                text=True,
                check=True,
            )
            heard = set(json.loads(found.stdout))
            assert space.address in heard
            assert heard <= {space.address, "127.0.0.1"}
        assert hosts.codes() == [0, 0], hosts.all_said()
    run_command_in(tmp_path, "run", "dropout_model.json", *SAVING[:4], "--metrics", "whole.jsonl")
    assert losses(tmp_path / "metrics.jsonl") == losses(tmp_path / "whole.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plan_is_verified_on_two_hosts(tmp_path: Path) -> None:
    skip_without_spaces()
    planned(tmp_path, "2x2xcpu", Forced(dp=2, tp=2, zero=1))
    with host_spaces(2) as spaces, agents(tmp_path, spaces) as hosts:
        for host in range(2):
            hosts.start(host, "verify", "dropout_model.json", "--nnodes", "2")
        assert hosts.codes() == [0, 0], hosts.all_said()
        assert "verified: " in hosts.said(0, "out")


SLOW = """
import os, pathlib, time
from dropout_model import *
from dropout_model import build_data as whole

def build_data(rank, world, *, global_batch, seed, start):
    batches = whole(rank, world, global_batch=global_batch, seed=seed, start=start)
    for number, each in enumerate(batches, start):
        time.sleep(0.1)
        while number >= 20 and not (
            os.environ["WORLD_SIZE"] == "4" and pathlib.Path(__file__).with_name("lost").exists()
        ):
            time.sleep(0.1)
        yield each
"""
"""After 20 steps the run waits until a host was lost and has come back."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_hosts", "per_host"), [(4, 1), (2, 2)])
def test_a_run_goes_on_without_a_lost_host_and_with_it_when_it_comes_back(
    num_hosts: int, per_host: int, tmp_path: Path
) -> None:
    """Four ranks, then those of one host fewer, then four; the losses are those of one plan."""
    skip_without_spaces()
    planned(tmp_path, f"{num_hosts}x{per_host}xcpu", Forced(dp=num_hosts * per_host, zero=1))
    (tmp_path / "killed_model.py").write_text(SLOW)
    steps = ("--steps", "30", "--seed", "3")
    common = (
        "run",
        "killed_model.json",
        *steps,
        "--save",
        "run",
        "--save-every",
        "3",
        "--keep",
        "2",
        "--metrics",
        "metrics.jsonl",
        "--nnodes",
        f"{num_hosts - 1}:{num_hosts}",
        "--elastic",
        "--max-restarts",
        "1",
    )
    with host_spaces(num_hosts) as spaces, agents(tmp_path, spaces) as hosts:
        for host in range(num_hosts):
            hosts.start(host, *common)
        hosts.wait_for_step(8)
        hosts.processes[-1].kill()
        (tmp_path / "lost").touch()
        hosts.wait_for_words("autoparallel: the run goes on after step ")
        hosts.wait_for_step(14)
        del hosts.processes[-1]
        hosts.start(num_hosts - 1, *common)
        assert set(hosts.codes(400.0)) == {0}, hosts.all_said()
        err = hosts.all_said()
    fewer = (num_hosts - 1) * per_host
    assert "autoparallel: planning for the hosts that are there: " in err
    assert load_plan(tmp_path / "run" / f"plan-{fewer}.json").cluster.num_devices == fewer
    assert load_plan(tmp_path / "run" / "plan.json").cluster.num_devices == num_hosts * per_host
    run_command_in(tmp_path, "run", "dropout_model.json", *steps, "--metrics", "whole.jsonl")
    found, whole = losses(tmp_path / "metrics.jsonl"), losses(tmp_path / "whole.jsonl")
    assert len(found) == len(whole) == 30
    assert max(abs(one - other) for one, other in zip(found, whole, strict=True)) < 1e-5


LISTENING = """
import json, psutil
found = [c.laddr.ip for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN]
print(json.dumps(found))
"""
