"""In: faked findings. Out: proof that doctor says the right sentence, cure and exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hvdsync.comm.launch import LaunchInfo
from hvdsync.tools import doctor
from hvdsync.tools.diagnosis.findings import Findings
from hvdsync.tools.diagnosis.verdicts import Status, Verdict, is_broken, judge
from hvdsync.tools.horovod_build.installed import Installed
from hvdsync.tools.horovod_build.toolchain import Framework

Make = Callable[..., Findings]


def _only(found: Findings, topic: str) -> Verdict:
    verdicts = [verdict for verdict in judge(found) if verdict.topic == topic]
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def test_a_healthy_machine_has_nothing_broken_and_no_warning(findings: Make) -> None:
    verdicts = judge(findings())
    assert not is_broken(verdicts)
    assert [verdict for verdict in verdicts if verdict.status is Status.WARNING] == []


def test_a_missing_compiler_is_broken_when_horovod_must_still_be_built(findings: Make) -> None:
    verdict = _only(findings(compiler=None, horovod=None), "compiler")
    assert verdict.status is Status.BROKEN
    assert "no C++ compiler is found" in verdict.text
    assert "apt install g++" in verdict.cure


def test_a_missing_compiler_is_a_warning_when_horovod_is_built(findings: Make) -> None:
    found = findings(compiler=None)
    assert _only(found, "compiler").status is Status.WARNING
    assert not is_broken(judge(found))


def test_a_torch_upgraded_after_the_build_is_named_with_both_versions(findings: Make) -> None:
    frameworks = {**findings().frameworks, "torch": Framework("torch", "2.14.0")}
    verdict = _only(findings(frameworks=frameworks), "Horovod for PyTorch")
    assert verdict.status is Status.BROKEN
    assert "built for 2.13.0+cpu, found 2.14.0" in verdict.text
    assert verdict.cure == "python -m hvdsync build-horovod --torch"


def test_horovod_not_installed_says_what_to_run(findings: Make) -> None:
    found = findings(horovod=None, tried={})
    verdict = _only(found, "Horovod")
    assert verdict.status is Status.BROKEN
    assert verdict.text == "Horovod is not installed"
    assert verdict.cure == "python -m hvdsync build-horovod"
    assert is_broken(judge(found))


def test_no_mpi_is_a_warning_for_a_gloo_build(findings: Make) -> None:
    records = {"torch": {"key": "key-torch", "mpi": None}}
    horovod = Installed("0.28.1", Path("/venv"), {"torch": "2.13.0+cpu"}, records)
    frameworks = {"torch": Framework("torch", "2.13.0+cpu")}
    keys = {"torch": "key-torch"}
    found = findings(mpi=None, horovod=horovod, frameworks=frameworks, fitting_keys=keys)
    verdict = _only(found, "MPI")
    assert verdict.status is Status.WARNING
    assert "no MPI is found" in verdict.text
    assert "hvdsync[mpi]" in verdict.cure
    assert not is_broken(judge(found))


def test_an_mpi_that_went_away_after_the_build_is_broken(findings: Make) -> None:
    verdict = _only(findings(mpi=None), "Horovod for PyTorch")
    assert verdict.status is Status.BROKEN
    assert "openmpi5.0.11, which is gone" in verdict.text


def test_an_mpi_that_was_refused_is_left_out_and_not_gone(findings: Make) -> None:
    found = findings(mpi=None, mpi_choice="none")
    verdict = _only(found, "MPI")
    assert verdict.status is Status.NOTE
    assert verdict.text.startswith("left out (HVDSYNC_MPI=none)")
    assert not is_broken(judge(found))


def test_an_extension_for_one_framework_only_is_a_warning(findings: Make) -> None:
    healthy = findings().horovod
    assert healthy is not None
    horovod = Installed(
        "0.28.1", Path("/v"), {"torch": "2.13.0+cpu"}, {"torch": healthy.records["torch"]}
    )
    found = findings(horovod=horovod)
    verdict = _only(found, "Horovod for TensorFlow")
    assert verdict.status is Status.WARNING
    assert "not built for TensorFlow" in verdict.text
    assert verdict.cure.endswith("--tensorflow")
    assert not is_broken(judge(found))


def test_an_all_reduce_that_failed_is_broken_and_says_what_it_said(findings: Make) -> None:
    found = findings(tried={"torch": "ImportError: libmpi.so.40", "tensorflow": None})
    verdict = _only(found, "Horovod for PyTorch")
    assert verdict.status is Status.BROKEN
    assert "ImportError: libmpi.so.40" in verdict.text


def test_a_build_by_other_hands_is_a_warning(findings: Make) -> None:
    horovod = Installed("0.28.1", Path("/v"), {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"}, {})
    verdict = _only(findings(horovod=horovod), "Horovod for PyTorch")
    assert verdict.status is Status.WARNING
    assert "not by hvdsync" in verdict.text


def test_a_build_with_other_replacements_is_a_warning(findings: Make) -> None:
    found = findings(fitting_keys={"torch": "key-newer", "tensorflow": "key-tensorflow"})
    verdict = _only(found, "Horovod for PyTorch")
    assert verdict.status is Status.WARNING
    assert "key-torch" in verdict.text and "key-newer" in verdict.text


def test_gpus_with_a_cpu_build_of_torch_are_a_warning(findings: Make) -> None:
    verdict = _only(findings(gpus=["H200", "H200"]), "GPU with PyTorch")
    assert verdict.status is Status.WARNING
    assert "2.13.0+cpu is a CPU build" in verdict.text
    assert _only(findings(gpus=["H200", "H200"]), "GPU").text == "2 x H200"


def test_a_cuda_torch_with_a_horovod_without_nccl_is_a_warning(findings: Make) -> None:
    frameworks = {"torch": Framework("torch", "2.14.1+cu130", "13.0")}
    records = {"torch": {"key": "key-torch", "mpi": None, "answers": {"built with NCCL": False}}}
    horovod = Installed("0.28.1", Path("/v"), {"torch": "2.14.1+cu130"}, records)
    found = findings(gpus=["H200"], frameworks=frameworks, horovod=horovod)
    verdict = _only(found, "GPU with PyTorch")
    assert verdict.status is Status.WARNING
    assert "without NCCL" in verdict.text
    assert verdict.cure.startswith("install the CUDA toolkit (nvcc) and NCCL, then")
    assert verdict.cure.endswith("--torch --gpu nccl")


def test_no_framework_at_all_is_broken(findings: Make) -> None:
    found = findings(frameworks={}, horovod=None, fitting_keys={}, tried={})
    assert _only(found, "frameworks").status is Status.BROKEN


def test_the_launcher_that_started_it_is_shown(findings: Make) -> None:
    launch = LaunchInfo("mpirun", rank=1, size=4, local_rank=1, local_size=2)
    verdict = _only(findings(launch=launch), "launcher")
    assert verdict.text == "mpirun: rank 1 of 4, local rank 1 of 2"


def test_what_a_launcher_changes_for_a_script_is_said(findings: Make) -> None:
    elastic = LaunchInfo("horovodrun", 0, 2, 0, 2, elastic=True)
    assert _only(findings(launch=elastic), "launcher").text.endswith("the numbers of its start")
    torchrun = LaunchInfo("torchrun", 0, 2, 0, 2)
    assert 'init(engine="ddp")' in _only(findings(launch=torchrun), "launcher").text


def _run(monkeypatch: pytest.MonkeyPatch, found: Findings, *arguments: str) -> Any:
    monkeypatch.setattr(doctor, "gather", lambda **_: found)
    return CliRunner().invoke(doctor.command, [*arguments], env={"COLUMNS": "100"})


def test_exit_code_0_and_one_screen_on_a_healthy_machine(
    findings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _run(monkeypatch, findings())
    assert result.exit_code == 0
    assert "Nothing needed is broken" in result.output
    assert len(result.output.splitlines()) <= 40


def test_exit_code_1_when_something_needed_is_broken(
    findings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = _run(monkeypatch, findings(horovod=None))
    assert result.exit_code == 1
    assert "Horovod is not installed" in result.output
    assert "python -m hvdsync build-horovod" in result.output


@pytest.mark.parametrize("healthy", [True, False])
def test_json_holds_verdicts_and_findings(
    healthy: bool, findings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = findings() if healthy else findings(horovod=None)
    result = _run(monkeypatch, found, "--json")
    content = json.loads(result.output)
    assert content["ok"] is healthy
    assert result.exit_code == (0 if healthy else 1)
    assert content["findings"]["frameworks"]["torch"]["version"] == "2.13.0+cpu"
    statuses = {verdict["topic"]: verdict["status"] for verdict in content["verdicts"]}
    assert statuses["PyTorch"] == "ok"


def test_under_a_launcher_rank_0_speaks_and_who_has_something_broken(
    findings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (LaunchInfo("srun", rank, 2, 0, 1) for rank in (0, 1))
    assert "srun: rank 0 of 2" in _run(monkeypatch, findings(launch=first)).output
    assert _run(monkeypatch, findings(launch=second)).output == ""
    broken = _run(monkeypatch, findings(launch=second, horovod=None))
    assert broken.exit_code == 1
    assert "Horovod is not installed" in broken.output
