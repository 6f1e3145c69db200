"""``autoparallel launch``: write the files that start a plan on every host of its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autoparallel.launching.job import PLAN_FILE, check_lines, job_of, read_hosts
from autoparallel.launching.kubernetes import MANIFEST, kubernetes_files
from autoparallel.launching.slurm import BATCH_SCRIPT, slurm_files
from autoparallel.launching.ssh import START_SCRIPT, ssh_files
from autoparallel.options.outputs import writing
from autoparallel.options.results import say
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan_file import dumps
from autoparallel.planning.plan_files import load_plan
from autoparallel.target.trust import check_trusted


def launch(
    plan: str,
    run_options: list[str] | None,
    *,
    slurm: bool,
    k8s: bool,
    ssh: bool,
    output: str,
    hosts: str | None,
    name: str,
    partition: str | None,
    account: str | None,
    time: str | None,
    image: str | None,
    claim: str | None,
    workdir: str | None,
    setup: str,
    port: int,
    max_restarts: int,
) -> None:
    """Write the files that start a plan's training on all hosts by Slurm, Kubernetes or ssh."""
    if slurm + k8s + ssh != 1:
        raise UsageError(
            "AP370", "one launcher must be chosen", fix="give one of --slurm, --k8s and --ssh"
        )
    loaded = load_plan(plan)
    folder = Path(output)
    job = job_of(
        loaded.cluster,
        name=name,
        hosts=read_hosts(hosts),
        folder=folder,
        setup=setup,
        arguments=run_options or (),
        port=port,
        max_restarts=max_restarts,
    )
    if workdir is not None:
        job = replace(job, workdir=workdir)
    elif not k8s:  # the run starts in this folder, and would report it only on the hosts
        check_trusted(
            loaded,
            folder / PLAN_FILE,
            trust="--trust" in job.arguments,
            how="give the run's option: launch … -- --trust; or start it in that folder",
        )
    check_lines(
        {
            "--output": job.folder,
            "--workdir": job.workdir,
            "--name": name,
            "--partition": partition,
            "--account": account,
            "--time": time,
            "--setup": setup,
            "--image": image,
            "--claim": claim,
            **{f"option {number} of the run": text for number, text in enumerate(job.arguments, 1)},
        }
    )
    files: Mapping[str, str]
    if slurm:
        files = slurm_files(job, partition=partition, account=account, time=time)
        start = f"sbatch {folder / BATCH_SCRIPT}"
    elif ssh:
        files, start = ssh_files(job), f"bash {folder / START_SCRIPT}"
    else:
        files = kubernetes_files(
            job, dumps(loaded), image=image, claim=claim, workdir=workdir or "/workspace"
        )
        start = f"kubectl apply -f {folder / MANIFEST}"
    _write(folder, files if k8s else {**files, PLAN_FILE: dumps(loaded)})
    say(f"{', '.join(files)} for {job.num_hosts} hosts in {folder}; start with:\n  {start}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files, scripts as executables. Raises UsageError AP101 if that fails."""
    with writing(folder, "--output"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                path.chmod(0o755)
