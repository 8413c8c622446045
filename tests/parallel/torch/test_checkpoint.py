"""Checkpoints on several ranks: one writes, all learn, each gets back what was its own."""

import copy
import os
import pickle
import random
import shutil
import subprocess
import sys
import textwrap
import zipfile
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import hvdsync.torch as hvd
from hvdsync.checkpoint import store
from hvdsync.comm import trees, world
from hvdsync.errors import CheckpointError
from tests import disks
from tests.parallel.processes import alone, without_hvdsync
from tests.parallel.torch.helpers import assert_equal_on_all_ranks

MODES = pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])


def on_rank_zero(context):
    """A context that rank 0 alone enters; the others come out when it has."""
    return context if hvd.rank() == 0 else nullcontext()


def meet():
    hvd.agree_all(True)


def large():
    return nn.Linear(1000, 1000)  # 4 MB


def test_one_rank_writes_whatever_the_others_hold(tmp_path):
    """Each rank has a directory of its own; the file is rank 0's, byte for byte."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(hvd.rank())
    own = tmp_path / f"rank{hvd.rank()}"
    with hvd.Checkpoint(own) as checkpoint:
        checkpoint.save(1, model=model, epoch=hvd.rank())
        assert own.exists() == (hvd.rank() == 0)
        found = checkpoint.restore(model=model)
    assert found["epoch"] == 0
    assert model.weight.tolist() == [[0.0] * 3] * 3
    if hvd.rank() == 0:
        stored = torch.load(own / "step-00000001" / "model.pt", weights_only=True)
        assert torch.equal(stored["weight"], torch.zeros(3, 3))


def draws(generator=None):
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.nn.functional.dropout(torch.ones(20), 0.5).tolist(),
        torch.rand(2, generator=generator).tolist(),
    ]


def test_each_rank_draws_on_from_its_own_random_state(shared_path):
    random.seed(hvd.rank())
    np.random.seed(hvd.rank())
    torch.manual_seed(hvd.rank())
    generator = torch.Generator().manual_seed(50 + hvd.rank())
    draws(generator)  # an odd number of gauss(): Python and NumPy keep the second of a pair
    state = hvd.RandomState(generator)
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, random=state, epoch=3)
        expected = [draws(generator) for _ in range(3)]
        assert len({str(other) for other in hvd.allgather_object(expected)}) == hvd.size()
        assert checkpoint.restore(random=state)["epoch"] == 3
        assert [draws(generator) for _ in range(3)] == expected
        with pytest.raises(CheckpointError, match="expected python, numpy, torch; give"):
            checkpoint.restore(random=hvd.RandomState())


def test_random_state_stays_as_it_is_at_another_world_size(shared_path):
    if hvd.size() == 1:
        pytest.skip("one rank only")
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, random=hvd.RandomState(), model=nn.Linear(1, 1))
    script = """
        import logging, sys, torch
        import hvdsync.torch as hvd
        logging.basicConfig(stream=sys.stdout)
        torch.manual_seed(5)
        expected = torch.get_rng_state()
        checkpoint = hvd.Checkpoint(sys.argv[1])
        model = torch.nn.Linear(1, 1)
        torch.set_rng_state(expected)
        assert checkpoint.restore(random=hvd.RandomState(), model=model)["step"] == 1
        assert torch.equal(torch.get_rng_state(), expected)
    """
    if hvd.rank() == 0:
        said = alone(script, shared_path)
        assert f"random of {hvd.size()} ranks, and there are 1 now" in said
    meet()


class Own:
    per_rank = True

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state):
        if isinstance(self.state, Exception):
            raise self.state
        self.state = state


def test_per_rank_objects_that_fail_or_differ_raise_on_all_ranks(shared_path):
    last = hvd.size() - 1
    with hvd.Checkpoint(shared_path) as checkpoint:
        broken = ValueError("no state") if hvd.rank() == last else {}
        with pytest.raises(CheckpointError, match=f"rank {last}: ValueError.'no state'"):
            checkpoint.save(1, own=Own(broken))
        if hvd.size() > 1:
            given = {"own": Own({})} if hvd.rank() == last else {}
            with pytest.raises(CheckpointError, match=rf"rank {last} gave .*\['own'\]"):
                checkpoint.save(1, **given)
        checkpoint.save(1, own=Own({"rank": hvd.rank()}))
        with pytest.raises(CheckpointError, match="no state" if hvd.rank() == last else "another"):
            checkpoint.restore(own=Own(broken))
        assert checkpoint.restore(own=Own({}))["own"].state == {"rank": hvd.rank()}


@MODES
def test_a_full_disk_raises_on_all_ranks_and_leaves_what_was_there(shared_path, background):
    with on_rank_zero(disks.small(shared_path / "disk", megabytes=3)):
        meet()
        checkpoint = hvd.Checkpoint(shared_path / "disk" / "run", background=background)
        small = nn.Linear(2, 2)
        checkpoint.save(1, model=small)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written.*are free there"):
            checkpoint.save(2, model=large())
            checkpoint.wait()
        assert checkpoint.latest() == 1
        checkpoint.save(3, model=small)
        checkpoint.close()
        assert checkpoint.latest() == 3
        meet()


@MODES
def test_a_read_only_disk_raises_on_all_ranks(shared_path, background):
    checkpoint = hvd.Checkpoint(shared_path, background=background)
    checkpoint.save(1, epoch=1)
    checkpoint.wait()
    with on_rank_zero(disks.read_only(shared_path)):
        meet()
        with pytest.raises(CheckpointError, match="Read-only|Permission"):
            checkpoint.save(2, epoch=2)
            checkpoint.wait()
        assert checkpoint.latest() == 1
    checkpoint.save(2, epoch=2)
    checkpoint.close()
    assert checkpoint.latest() == 2


@MODES
def test_a_directory_that_was_removed_is_made_anew(shared_path, background):
    checkpoint = hvd.Checkpoint(shared_path / "run", background=background)
    checkpoint.save(1, epoch=1)
    checkpoint.wait()
    hvd.rank_zero_only(shutil.rmtree)(shared_path / "run")
    checkpoint.save(2, epoch=2)
    assert checkpoint.latest() == 2
    checkpoint.close()


def test_a_directory_of_another_job_is_refused_on_all_ranks(shared_path, monkeypatch):
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.2)
    script = """
        import sys
        from pathlib import Path
        from hvdsync.checkpoint.store import Store
        held = Store(Path(sys.argv[1]), 1)
        held.write(1, lambda folder: None, {"items": []})
        print("locked", flush=True)
        sys.stdin.read()
    """
    if hvd.rank() == 0:
        other = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), shared_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert other.stdout.readline() == b"locked\n"
    meet()
    checkpoint = hvd.Checkpoint(shared_path)
    with pytest.raises(CheckpointError, match="another job is writing"):
        checkpoint.save(2, epoch=1)
    assert checkpoint.latest() == 1
    if hvd.rank() == 0:
        other.communicate()
        assert other.returncode == 0
    checkpoint.save(2, epoch=1)
    assert checkpoint.latest() == 2
    checkpoint.close()


def test_a_failed_background_save_is_raised_on_all_ranks_by_what_comes_next(shared_path):
    checkpoint = hvd.Checkpoint(shared_path, background=True, best="loss", mode="min")
    checkpoint.save(1, model=nn.Linear(1, 1), loss=2.0)
    checkpoint.wait()
    for ask in (
        lambda: checkpoint.save(3, loss=0.5),
        checkpoint.restore,
        checkpoint.restore_best,
        checkpoint.latest,
        checkpoint.best,
        checkpoint.wait,
        checkpoint.close,
    ):
        if hvd.rank() == 0:
            (shared_path / ".unfinished-step-00000002").write_text("where a folder must be")
        checkpoint.save(2, loss=1.0)
        with pytest.raises(CheckpointError, match="checkpoint of step 2 failed"):
            ask()
        assert checkpoint.latest() == 1
    hvd.rank_zero_only(os.remove)(shared_path / ".unfinished-step-00000002")
    checkpoint.save(2, loss=3.0)
    assert (checkpoint.latest(), checkpoint.best()) == (2, 1)
    assert checkpoint.restore_best(model=nn.Linear(1, 1))["loss"] == 2.0
    checkpoint.close()


def test_a_background_save_holds_the_state_of_its_moment(shared_path):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(2, 2, dtype=torch.bfloat16)
    )
    model.to(memory_format=torch.channels_last)
    expected = copy.deepcopy(model.state_dict())
    with hvd.Checkpoint(shared_path, background=True) as checkpoint:
        folder = checkpoint.save(1, model=model)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(1)
        checkpoint.wait()
        assert checkpoint.restore(model=model)["step"] == 1
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])
    if hvd.rank() == 0:
        stored = torch.load(folder / "model.pt", weights_only=True)
        assert list(stored) == list(expected)
        assert stored._metadata == expected._metadata
        for key, value in stored.items():
            assert (value.dtype, value.stride()) == (expected[key].dtype, expected[key].stride())


def test_a_slice_of_a_large_tensor_is_written_without_the_rest(shared_path):
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.zeros(1000, 2)[:1]
    for step, background in enumerate([False, True]):
        with hvd.Checkpoint(shared_path, background=background) as checkpoint:
            folder = checkpoint.save(step, model=model)
        if hvd.rank() == 0:
            assert (folder / "model.pt").stat().st_size < 4000


def test_state_larger_than_a_message_travels_in_chunks(shared_path, monkeypatch):
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(3, 2))
    expected = copy.deepcopy(model.state_dict())
    sizes = []
    active = world.current()

    class Counting(type(active)):
        def broadcast(self, array, *rest, **named):
            sizes.append(array.nbytes)
            return super().broadcast(array, *rest, **named)

    monkeypatch.setattr(trees, "CHUNK_BYTES", 1000)
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, model=model)
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        monkeypatch.setattr(active, "__class__", Counting)
        checkpoint.restore(model=model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])
    payload = sum(value.nbytes for value in expected.values())
    if hvd.size() > 1:
        assert sizes.count(1000) == payload // 1000
        assert payload % 1000 in sizes


def test_another_model_is_told_by_its_tensors_and_no_rank_is_touched(shared_path):
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        other = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(CheckpointError) as error:
            checkpoint.restore(model=other)
        assert "'model': it is of another model" in str(error.value)
        assert "not expected: 1.running_mean (2,), 1.running_var (2,)" in str(error.value)
        assert "0.weight: found (2, 2), expected (2, 3)" in str(error.value)
        for key, value in other.state_dict().items():
            assert torch.equal(value, before[key])
        with pytest.raises(CheckpointError, match=r"missing: 2.weight \(1, 2\), 2.bias \(1,\)"):
            checkpoint.restore(
                model=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
            )


def test_a_model_that_differs_on_one_rank_is_refused_on_all_before_any_is_changed(shared_path):
    last = hvd.size() - 1
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, model=nn.Linear(2, 2))
        model = nn.Linear(2, 3 if hvd.rank() == last else 2)
        before = model.weight.clone()
        with pytest.raises(
            CheckpointError, match="of another shape" if hvd.rank() == last else "another rank"
        ):
            checkpoint.restore(model=model)
        assert torch.equal(model.weight, before)


def test_an_optimizer_of_other_parameters_is_refused(shared_path):
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, expected \[1\]"):
            checkpoint.restore(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_a_file_is_executed(shared_path):
    def hostile(folder):
        (folder / "values.json").write_text("{}")
        with zipfile.ZipFile(folder / "model.pt", "w") as file:
            file.writestr("model/data.pkl", pickle.dumps(Evil(str(shared_path / "ran")), 2))
            file.writestr("model/version", "3\n")

    if hvd.rank() == 0:
        writer = store.Store(shared_path, 1)
        writer.write(1, hostile, {"items": ["model"]})
        writer.close()
    meet()
    with pytest.raises(CheckpointError, match="does not read as tensors and plain values"):
        hvd.Checkpoint(shared_path).restore(model=nn.Linear(1, 1))
    assert not (shared_path / "ran").exists()


class Custom:
    """A state that only code from the file could bring back."""

    def state_dict(self):
        return {"who": Custom()}

    def load_state_dict(self, state):
        raise AssertionError


@MODES
def test_state_that_could_not_be_loaded_again_is_refused_at_the_save(shared_path, background):
    checkpoint = hvd.Checkpoint(shared_path, background=background)
    with pytest.raises(CheckpointError, match=r"'ema' holds .*Custom"):
        checkpoint.save(1, ema=Custom())
        checkpoint.wait()
    assert checkpoint.latest() is None
    checkpoint.close()


def test_files_open_where_neither_hvdsync_nor_horovod_can_be_imported(shared_path):
    model, optimizer = hvd.distribute(
        model := nn.Linear(2, 2), torch.optim.Adam(model.parameters(), lr=0.125)
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with hvd.Checkpoint(shared_path, background=True) as checkpoint:
        folder = checkpoint.save(1, model=model, optimizer=optimizer)
    script = """
        import sys

        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model.load_state_dict(torch.load(sys.argv[1] + "/model.pt", weights_only=True))
        optimizer.load_state_dict(torch.load(sys.argv[1] + "/optimizer.pt", weights_only=True))
        print(model.weight.tolist(), optimizer.param_groups[0]["lr"])
        print(optimizer.state[model.bias]["step"].item())
    """
    if hvd.rank() == 0:
        assert without_hvdsync(script, folder) == f"{model.weight.tolist()} 0.125\n1.0\n"
    meet()
    assert_equal_on_all_ranks(model.parameters())
