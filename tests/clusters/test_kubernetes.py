"""The manifests and the Dockerfile, as far as they can be tried without a cluster."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "scripts" / "kubernetes"
SECONDS = 300


def documents(name):
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


def as_pod(template):
    metadata = {"name": "tried"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_manifests_fit_their_schema():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    service, job = documents("indexed-job.yaml")
    (mpi_job,) = documents("mpijob.yaml")
    replicas = mpi_job["spec"]["mpiReplicaSpecs"].values()
    version = kubernetes_validate.latest_version()
    for document in (service, job, *(as_pod(replica["template"]) for replica in replicas)):
        kubernetes_validate.validate(document, version, strict=True)
    job["spec"]["completion"] = job["spec"].pop("completions")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, version, strict=True)


def option(words, name):
    return next(
        words[i + 1] if word == name else word.partition("=")[2]
        for i, word in enumerate(words)
        if word == name or word.startswith(f"{name}=")
    )


def test_an_mpi_job_starts_as_many_ranks_as_its_workers_have_slots():
    (job,) = documents("mpijob.yaml")
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    (container,) = launcher["template"]["spec"]["containers"]
    assert int(option(container["command"], "-np")) == (
        worker["replicas"] * job["spec"]["slotsPerWorker"]
    )


def test_the_workers_of_an_indexed_job_find_the_first_by_its_name():
    service, job = documents("indexed-job.yaml")
    words = indexed_command(job)
    name, pods = job["metadata"]["name"], job["spec"]["completions"]
    assert int(option(words, "--nnodes")) == pods == job["spec"]["parallelism"]
    assert option(words, "--master-addr") == f"{name}-0.{service['metadata']['name']}"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}


def indexed_command(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shell, _, line = container["command"]
    assert shell == "sh"
    return shlex.split(line)


@pytest.mark.timeout(2 * SECONDS)
def test_the_command_of_an_indexed_job_trains(tmp_path):
    pytest.importorskip("torch")
    for part, count in (("train", 64), ("test", 16)):
        np.save(tmp_path / f"x_{part}.npy", np.zeros((count, 8, 8), np.float32))
        np.save(tmp_path / f"y_{part}.npy", np.arange(count) % 2)
    *_, job = documents("indexed-job.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = container["command"][2]
    for found, here in (
        ("--nnodes=4", "--nnodes=2"),
        ("hvdsync-0.hvdsync", "127.0.0.1"),
        ("29400", str(port)),
        ("/runs/", f"{tmp_path}/runs/"),
    ):
        assert found in line
        line = line.replace(found, here)
    line += f" --dataset {tmp_path} --model linear --epochs 1 --batch-size 8 --device cpu"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    pods = [
        subprocess.Popen(
            ["sh", "-c", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "JOB_COMPLETION_INDEX": i},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in "01"
    ]
    said = [pod.communicate(timeout=SECONDS)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(said)
    assert list((tmp_path / "runs" / "hvdsync").glob("step-*"))


def test_the_dockerfile_has_nothing_that_a_linter_warns_of():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("there is no hadolint")
    result = subprocess.run(
        [linter, ROOT / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout == ""
