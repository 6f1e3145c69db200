"""``autoparallel launch``: its files pass the checks of the tools that take them, and start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoparallel.__main__ import run_command
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.planning.plan_files import load_plan, save_plan

ROOT = Path(__file__).resolve().parents[2]
TARGET = str(ROOT / "tests/models/regression.py")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two hosts of one process."""
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    target = shutil.copy(TARGET, path.parent)
    arguments = ["--cluster", "2x1xcpu", "--global-batch", "4", "--parallel", "dp=2,zero=0"]
    assert run_command(["plan", str(target), *arguments, "--no-cache", "-o", str(path)]) == 0
    return path


def launch(
    planned: Path, cluster: str | Cluster, *arguments: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Path]:
    """The exit code and the folder, for the plan as if it were for ``cluster``."""
    folder = planned.parent
    monkeypatch.chdir(folder)
    own = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    save_plan(replace(load_plan(planned), cluster=own), folder / "own.json")
    shutil.rmtree(folder / "launch", ignore_errors=True)
    return run_command(["launch", "own.json", *arguments]), folder / "launch"


def stand_ins(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment in which these commands are the given scripts."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


SCHEDULERS = [
    ("4x8xH100", ("--slurm", "--partition", "gpu", "--account", "a", "--time", "1:00:00")),
    ("8xA100+8xH100", ("--slurm", "--hosts", "n1,n2")),
    ("2x8xH100", ("--ssh", "--hosts", "me@n1,n2", "--setup", "source 'a b/activate'")),
    ("8xA100+4xH100", ("--ssh", "--hosts", "n1,n2", "--", "--steps", "3", "--save", "a b")),
]


@pytest.mark.parametrize(("cluster", "arguments"), SCHEDULERS)
def test_scripts_pass_shellcheck(
    planned: Path, cluster: str, arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, folder = launch(planned, cluster, *arguments, monkeypatch=monkeypatch)
    assert code == 0
    scripts = [*folder.glob("*.sh"), *folder.glob("*.sbatch")]
    assert len(scripts) == 2
    # no setup file of the user's can be followed from here
    done = subprocess.run(
        ["shellcheck", "--exclude", "SC1091", *map(str, scripts)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_the_manifest_has_the_schema_of_kubernetes(
    planned: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the published OpenAPI schemas, with no unknown field allowed."""
    arguments = ("--k8s", "--image", "r/i:1", "--claim", "work", "--max-restarts", "2")
    code, folder = launch(planned, "2x8xH100", *arguments, monkeypatch=monkeypatch)
    assert code == 0
    manifest = json.loads((folder / "job.json").read_text())
    kinds = [item["kind"] for item in manifest["items"]]
    assert kinds == ["Service", "ConfigMap", "Job"]
    for item in manifest["items"]:
        kubernetes_validate.validate(item, version, strict=True)
    service, files, job = manifest["items"]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    own = folder / "host.sh"
    own.write_text(files["data"]["host.sh"])
    assert subprocess.run(["shellcheck", str(own)], check=False).returncode == 0
    assert "--max-restarts" in files["data"]["host.sh"]


def test_a_wrong_manifest_is_noticed(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = launch(planned, "2x8xH100", "--k8s", "--image", "i", monkeypatch=monkeypatch)
    job = json.loads((folder / "job.json").read_text())["items"][2]
    job["spec"]["complettions"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.37", strict=True)


TORCHRUN = 'printf "%s " "$@" >> calls; echo >> calls'


@pytest.mark.parametrize(
    ("cluster", "named", "numbers"),
    [
        ("2x8xH100", (), {"n1": 0, "n2": 1}),
        ("8xA100+8xH100", ("--hosts", "n2,n1"), {"n2": 0, "n1": 1}),
    ],
)
def test_slurm_starts_each_host_in_its_place(
    planned: Path,
    tmp_path: Path,
    cluster: str,
    named: Sequence[str],
    numbers: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """srun runs its command once per host, as the stand-in does."""
    code, folder = launch(planned, cluster, "--slurm", *named, monkeypatch=monkeypatch)
    assert code == 0
    environment = stand_ins(
        tmp_path / "bin",
        torchrun=f"cd {tmp_path}; {TORCHRUN}",
        scontrol="printf 'n1\\nn2\\n'",
        srun='shift 2; for n in n1 n2; do SLURMD_NODENAME=$n "$@" || exit 1; done',
    )
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job = str(folder / "job.sbatch")
    subprocess.run(["bash", job], env={**environment, **slurm}, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    first = next(iter(numbers))
    assert len(calls) == 4  # each host checks, then trains
    for at, host in enumerate(["n1", "n2"]):
        check, train = calls[2 * at : 2 * at + 2]
        assert f"--rdzv-endpoint {first}:29400" in check
        assert f"--rdzv-endpoint {first}:29401" in train
        assert "autoparallel doctor --plan" in check
        assert "autoparallel run" in train
        place = f"--node-rank {numbers[host]} --rdzv-backend static"
        is_first = str(numbers[host] == 0).lower()
        assert (place if named else f"is_host={is_first} --rdzv-backend c10d") in train


def test_a_cluster_that_fails_its_check_does_not_train(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, folder = launch(
        planned, "8xA100+4xH100", "--ssh", "--hosts", "n1,n2", monkeypatch=monkeypatch
    )
    assert code == 0
    failing = f'cd {tmp_path}; {TORCHRUN}; [[ "$*" != *doctor* ]]'
    environment = stand_ins(tmp_path / "bin", torchrun=failing)
    done = subprocess.run(
        ["bash", str(folder / "host.sh"), "1", "n1"], env=environment, check=False
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 1
    assert len(calls) == 1
    assert "--nproc-per-node 4 --node-rank 1" in calls[0]


@pytest.mark.parametrize(
    ("cluster", "arguments", "error"),
    [
        ("2x8xH100", (), "AP370"),
        ("2x8xH100", ("--slurm", "--ssh"), "AP370"),
        ("8xH100", ("--ssh", "--hosts", "n1"), "AP371"),
        ("2x8xH100", ("--ssh", "--hosts", "n1"), "AP372"),
        ("2x8xH100", ("--ssh", "--hosts", "n1,n1"), "AP373"),
        ("2x8xH100", ("--ssh", "--hosts", "n1,a;b"), "AP373"),
        ("8xH100+4xH100", ("--slurm", "--hosts", "n1,n2"), "AP374"),
        ("8xH100+8xA100", ("--slurm",), "AP374"),
        ("2x8xH100", ("--ssh",), "AP375"),
        ("2x8xH100", ("--k8s",), "AP376"),
        ("8xH100+8xA100", ("--k8s", "--image", "i"), "AP377"),
        ("2x8xH100", ("--k8s", "--image", "i", "--name", "My_Job"), "AP378"),
        ("2x8xH100", ("--slurm", "-o", "own.json/x"), "AP101"),
        ("2x8xH100", ("--slurm", "--name", "a\nb"), "AP382"),
        ("2x8xH100", ("--slurm", "--partition", "gpu\n#SBATCH --wrap=x"), "AP382"),
        ("2x8xH100", ("--slurm", "-o", "a\nb"), "AP382"),
        ("2x8xH100", ("--k8s", "--image", "i", "--workdir", "/a\n/b"), "AP382"),
    ],
)
def test_what_cannot_be_started_is_said(
    planned: Path,
    cluster: str,
    arguments: Sequence[str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _ = launch(planned, cluster, *arguments, monkeypatch=monkeypatch)
    assert code == 2
    assert error in capsys.readouterr().err


def test_code_of_another_folder_is_asked_for_before_anything_is_written(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Else the hosts of a job that has waited for hours would refuse to run it."""
    monkeypatch.chdir(tmp_path)
    arguments = ["launch", str(planned), "--ssh", "--hosts", "n1,n2"]
    assert run_command(arguments) == 2
    said = capsys.readouterr().err
    assert "AP155" in said
    assert "-- --trust" in said
    assert not (tmp_path / "launch").exists()
    assert run_command([*arguments, "--", "--trust"]) == 0
    assert "plan.json --trust" in (tmp_path / "launch/host.sh").read_text()


def test_hosts_can_be_the_lines_of_a_file(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (planned.parent / "hosts").write_text("# mine\nn1 slots=8\n\nn2 slots=8\n")
    code, folder = launch(planned, "2x8xH100", "--ssh", "--hosts", "hosts", monkeypatch=monkeypatch)
    assert code == 0
    assert "hosts=(n1 n2)" in (folder / "start.sh").read_text()


HOSTILE = (
    "$(touch PWNED)",
    "`touch PWNED`",
    ";touch PWNED;",
    "a b",
    "'",
    '"',
    "\\",
    "&",
    "|",
    "#",
    "*",
    "%j",
    "!",
    "é",
    "~",
    "{a,b}",
    "-n",
)
"""Parts of names that a shell, Slurm or YAML reads otherwise than as they are."""


def hostile_names() -> st.SearchStrategy[str]:
    """Names of folders and values of options."""
    parts = st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=4)
    return parts.map(lambda own: f"x{''.join(own)}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(folder=hostile_names(), save=hostile_names(), kind=st.sampled_from(["ssh", "slurm", "k8s"]))
def test_names_reach_each_shell_as_they_are(
    planned: Path,
    tmp_path_factory: pytest.TempPathFactory,
    folder: str,
    save: str,
    kind: str,
) -> None:
    place = tmp_path_factory.mktemp("hostile")
    work = place / folder
    work.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        shutil.copy(planned, work / "plan.json")
        shutil.copy(planned.parent / "regression.py", work)
        where = ["--image", "i", "--workdir", str(work)] if kind == "k8s" else []
        hosts = ["--hosts", "n1,n2"] if kind == "ssh" else []
        name = "job" if kind == "k8s" else folder
        own = ["--name", name, "-o", "out", *where, *hosts, "--", "--trust", "--save", save]
        assert run_command(["launch", "plan.json", f"--{kind}", *own]) == 0
    environment = stand_ins(
        place / "bin",
        torchrun='printf "%s\\0" "$PWD" "$@" >> "$CALLS/calls"',
        ssh='shift 4; cd /; exec bash -c "$*"',
        scontrol="printf 'n1\\nn2\\n'",
        srun='shift 2; for n in n1 n2; do SLURMD_NODENAME=$n "$@" || exit 1; done',
    )
    environment |= {"CALLS": str(place), "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "2"}
    if kind == "k8s":
        manifest = json.loads((work / "out/job.json").read_text())
        script = manifest["items"][1]["data"]["host.sh"]
        (place / "host.sh").write_text(script)
        commands = [["bash", str(place / "host.sh"), str(number), "n1"] for number in (0, 1)]
    else:
        start = "start.sh" if kind == "ssh" else "job.sbatch"
        commands = [["bash", str(work / "out" / start)]]
    for command in commands:
        done = subprocess.run(
            command, cwd=place, env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    calls = (place / "calls").read_text().split("\0")
    assert calls.count(str(work)) >= 4  # two hosts check and train, in this folder
    assert calls.count(save) == 2
    assert not [path for path in place.rglob("PWNED*") if "$" not in path.name]
    if kind == "slurm":
        lines = (work / "out/job.sbatch").read_text().splitlines()
        words = [
            word
            for line in lines
            if line.startswith("#SBATCH ")
            for word in shlex.split(line.removeprefix("#SBATCH "), comments=True)
        ]
        assert f"--job-name={name}" in words
        assert f"--output={str(work / 'out').replace('%', '%%')}/slurm-%j.out" in words


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_two_hosts_over_ssh_check_and_train(
    planned: Path, tmp_path: Path, rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an ssh that runs its command here: two real torchruns meet, check and train.

    The link is described as slow as a busy machine's loopback may be.
    """
    cluster = parse_cluster("2x1xcpu")
    cluster = replace(cluster, inter_link=replace(cluster.inter_link, bytes_per_second=1e7))
    if rendezvous == "static":
        first, second = cluster.hosts
        slower = replace(second.device, launch_seconds=1e-4)
        cluster = replace(cluster, hosts=(first, replace(second, device=slower)))
    arguments = ("--ssh", "--hosts", "127.0.0.1,127.0.0.2", "--port", "29511", "--", "--steps", "2")
    code, folder = launch(planned, cluster, *arguments, monkeypatch=monkeypatch)
    assert code == 0
    assert f"--rdzv-backend {rendezvous}" in (folder / "host.sh").read_text()
    environment = stand_ins(tmp_path / "bin", ssh='shift 4; exec bash -c "$*"')
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    done = subprocess.run(
        ["bash", str(folder / "start.sh")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"(OK|WARN) +link ethernet", done.stdout)
    assert re.search(r"step +2 +loss", done.stdout)
    assert (folder / "logs/host1/train").is_dir()
