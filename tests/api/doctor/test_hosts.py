"""``doctor --hosts``: one command for all hosts, over an ssh that stands here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autoparallel.__main__ import run_command
from autoparallel.actions import doctor
from autoparallel.launching import ssh as ssh_launch

SAID = {
    "schema": "autoparallel.doctor/1",
    "result": [{"level": "OK", "name": "torch", "what": "", "fix": ""}],
}

SSH = """#!/usr/bin/env bash
shift 7
echo "$*" >> "$0.calls"
case $1 in
*fine*) printf 'noise\\r\\n'; sed 's/$/\\r/' "$0.said";;
down) echo "ssh: connect to host down port 22: No route to host" >&2; exit 255;;
bare) echo "doctor: line 9: torchrun: command not found"; exit 127;;
old) printf 'error[AP101]: there is no plan p.json\\n  fix: copy it\\nTraceback\\n'; exit 1;;
waits) sleep 600;;
here*) shift; exec bash -c "$*";;
esac
"""


@pytest.fixture(autouse=True)
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin/ssh"
    path.parent.mkdir()
    path.write_text(SSH)
    path.chmod(0o755)
    path.with_name("ssh.said").write_text(json.dumps(SAID, indent=2) + "\n")
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(ssh_launch, "PATIENCE_SECONDS", 0.2)
    return path


def findings(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> list[Any]:
    assert run_command(["doctor", "--json", *arguments]) == code
    return json.loads(capsys.readouterr().out)["result"]


def test_hosts_are_checked_alone_without_a_cluster(
    ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(capsys, "--hosts", "fine1,down,fine2,bare", "--setup", "cd 'a b'", code=5)
    assert [(each["level"], each["what"].split(":")[0]) for each in found] == [
        ("FAIL", "down"),
        ("FAIL", "bare"),
        ("OK", ""),
    ]
    assert found[0]["fix"].startswith("ssh-copy-id down")
    assert found[1]["fix"].startswith("--setup")
    calls = ssh.with_name("ssh.calls").read_text()
    assert calls.count("autoparallel doctor --timeout=120.0 --json") == 4


def test_hosts_of_a_cluster_are_checked_together(
    ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(capsys, "--cluster", "2x8xH100", "--hosts", "me@fine1,fine2", code=0)
    assert [each["name"] for each in found] == ["torch"]
    calls = ssh.with_name("ssh.calls").read_text()
    assert "doctor --timeout=120.0 --cluster 2x8xH100 --json" in calls
    assert calls.count(" doctor 0 fine1\n") == calls.count(" doctor 1 fine1\n") == 1


@pytest.mark.parametrize(
    ("failed", "what", "fix"),
    [
        ("down", "No route to host", "ssh-copy-id down"),
        ("bare", "torchrun: command not found", "--setup"),
        ("old", "error[AP101]: there is no plan p.json", "copy it"),
    ],
)
def test_a_host_that_fails_ends_the_others_and_is_told_with_a_fix(
    failed: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (found,) = findings(capsys, "--cluster", "2x1xcpu", "--hosts", f"waits,{failed}", code=5)
    assert found["what"].startswith(f"{failed}: ")
    assert what in found["what"]
    assert found["fix"].startswith(fix)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--hosts", "a", "--cluster", "2x1xcpu"), "AP372"),
        (("--hosts", "a,-oProxyCommand=b"), "AP373"),
        (("--hosts", "a", "--setup", "a\nb"), "AP382"),
    ],
)
def test_wrong_hosts_are_refused(
    arguments: tuple[str, ...], code: str, ssh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["doctor", *arguments]) == 2
    assert f"error[{code}]" in capsys.readouterr().err
    assert not ssh.with_name("ssh.calls").exists()


@pytest.mark.slow
def test_two_torchruns_meet_and_measure_the_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PORT", 29517)
    monkeypatch.setattr(ssh_launch, "PATIENCE_SECONDS", 30.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(doctor, "doctor_commands", _at_loopback)
    found = findings(capsys, "--cluster", "2x1xcpu", "--hosts", "here1,here2", code=0)
    assert any(each["name"].startswith("link ethernet") for each in found)


def _at_loopback(job: Any) -> dict[str, str]:
    commands = ssh_launch.doctor_commands(job)
    return {
        host: command.replace(f" {number} here1", f" {number} 127.0.0.1")
        for number, (host, command) in enumerate(commands.items())
    }
