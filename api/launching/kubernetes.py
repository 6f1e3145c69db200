"""Job for Kubernetes: an Indexed Job with one pod per host, behind a headless Service.

The Job numbers its pods in the plan's order, and the Service gives each a name that the others can
reach. The plan and the host's script are in a ConfigMap. All are written as one JSON list, which
kubectl accepts like YAML. Source:
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoparallel.planner.errors import UsageError

from .job import HOST_SCRIPT, PLAN_FILE, LaunchJob, host_script

MANIFEST = "job.json"
FILES = "/autoparallel"
"""Folder in the pods that has the plan and the script."""
MOST_BYTES = 1 << 20
"""Size limit of a ConfigMap (https://kubernetes.io/docs/concepts/configuration/configmap/)."""
LONGEST_NAME = 52
"""Length limit of a job's name: a pod's name with its number must be a DNS label (63 letters)."""


def kubernetes_files(
    job: LaunchJob, plan_text: str, *, image: str | None, claim: str | None, workdir: str
) -> Mapping[str, str]:
    """Return the Kubernetes manifest by file name. ``claim`` is a PersistentVolumeClaim for
    ``workdir``.

    Raises UsageError AP376 without an image, AP377 if the hosts differ or the plan is too large,
    and AP378 for a name that Kubernetes does not accept.
    """
    if image is None:
        raise UsageError(
            "AP376",
            "--k8s needs an image",
            fix="--image NAME: one with this package, and with the model's file in --workdir",
        )
    if job.is_ordered or job.common_devices is None:
        raise UsageError(
            "AP377",
            "the plan's hosts are not alike, and the pods of a Job are",
            fix="start it with --ssh, or with --slurm and --hosts",
        )
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > LONGEST_NAME:
        raise UsageError(
            "AP378",
            f"--name {job.name!r} cannot be the name of a Job",
            fix=f"at most {LONGEST_NAME} small letters, digits and -, a letter first",
        )
    # Logs lie beside the run's own files: a ConfigMap cannot be written to.
    there = replace(job, folder=FILES, workdir=workdir, logs=f"{workdir}/logs")
    files = {PLAN_FILE: plan_text, HOST_SCRIPT: host_script(there)}
    num_bytes = sum(len(text.encode()) for text in files.values())
    if num_bytes > MOST_BYTES:
        raise UsageError(
            "AP377",
            f"the plan has {num_bytes} bytes, and a ConfigMap at most {MOST_BYTES}",
            fix="start it with --slurm or --ssh",
        )
    items = [_service(job), _files(job, files), _job(job, image, claim, workdir)]
    return {MANIFEST: json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)}


Table = dict[str, Any]


def _metadata(job: LaunchJob) -> Table:
    return {"name": job.name, "labels": {"app": job.name}}


def _service(job: LaunchJob) -> Table:
    """Return the headless Service, which names pods before they are ready: they wait for each
    other."""
    spec = {
        "clusterIP": "None",
        "selector": {"job-name": job.name},
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": job.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _files(job: LaunchJob, files: Mapping[str, str]) -> Table:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "data": dict(files),
    }


def _job(job: LaunchJob, image: str, claim: str | None, workdir: str) -> Table:
    volumes: list[Table] = [
        {"name": "files", "configMap": {"name": job.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts: list[Table] = [
        {"name": "files", "mountPath": FILES},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if claim is not None:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "work", "mountPath": workdir})
    first = f"{job.name}-0.{job.name}"
    command = (
        f"until getent hosts {first} > /dev/null; do sleep 1; done\n"
        f'exec bash {FILES}/{HOST_SCRIPT} "$JOB_COMPLETION_INDEX" {first}'
    )
    count = str(job.common_devices)
    resources: Table = (
        {"limits": {"nvidia.com/gpu": count}} if job.uses_gpus else {"requests": {"cpu": count}}
    )
    container = {
        "name": "train",
        "image": image,
        "command": ["bash", "-c", command],
        "resources": resources,
        "volumeMounts": mounts,
        "ports": [{"containerPort": job.port}],
    }
    pod: Table = {
        "metadata": {"labels": {"app": job.name}},
        "spec": {
            "restartPolicy": "Never",
            "subdomain": job.name,
            "containers": [container],
            "volumes": volumes,
        },
    }
    if job.uses_gpus and job.num_hosts > 1:
        apart = {
            "labelSelector": {"matchLabels": {"app": job.name}},
            "topologyKey": "kubernetes.io/hostname",
        }
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}
        pod["spec"]["affinity"] = {"podAntiAffinity": rule}
    spec = {
        "completions": job.num_hosts,
        "parallelism": job.num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": pod,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job), "spec": spec}
