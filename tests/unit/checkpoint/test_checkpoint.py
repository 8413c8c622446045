"""The verb on one rank: which checkpoints stay, which one is taken, what is refused."""

import json
import logging
import random

import numpy as np
import pytest

from hvdsync.checkpoint.manifest import MANIFEST
from hvdsync.errors import CheckpointError
from tests.unit.checkpoint.arrays import Box, checkpoint


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def test_the_best_stays_beyond_keep_and_can_be_restored(tmp_path):
    with checkpoint(tmp_path, keep=1, best="accuracy") as manager:
        nan = float("nan")
        for step, accuracy in [(0, nan), (1, 0.5), (2, 0.9), (3, 0.9), (4, nan), (5, 0.8)]:
            manager.save(step, box=Box(float(step)), accuracy=accuracy)
        assert steps(tmp_path) == [2, 5]  # of equal ones the first
        assert (manager.best(), manager.latest()) == (2, 5)
        box = Box()
        found = manager.restore_best(box=box)
        assert (found["step"], found["accuracy"], box.array[0]) == (2, 0.9, 2.0)
        manager.save(6, box=Box(), accuracy=0.95)
        assert steps(tmp_path) == [6]


def test_a_lower_loss_is_better_and_later_jobs_know_the_earlier_ones(tmp_path):
    with checkpoint(tmp_path, keep=1, best="loss", mode="min") as manager:
        manager.save(1, loss=0.25)
        manager.save(2, loss=3)
    with checkpoint(tmp_path, keep=1, best="loss", mode="min") as manager:
        manager.save(3, loss=1.0)
        assert manager.best() == 1
        assert steps(tmp_path) == [1, 3]


def test_a_damaged_best_gives_way_to_the_next(tmp_path, caplog):
    with checkpoint(tmp_path, best="accuracy") as manager:
        manager.save(1, box=Box(), accuracy=0.7)
        folder = manager.save(2, box=Box(), accuracy=0.9)
        manager.save(3, box=Box(), accuracy=0.1)
        (folder / "box.npy").write_bytes(b"?")
        assert manager.best() == 1
        assert str(folder) in caplog.text


@pytest.mark.parametrize("value", [None, "high", True])
def test_a_best_that_is_no_number_is_refused(tmp_path, value):
    with checkpoint(tmp_path, best="accuracy") as manager:
        with pytest.raises(CheckpointError, match="best='accuracy' needs a number"):
            manager.save(1, accuracy=value)
        assert manager.best() is None
    with checkpoint(tmp_path) as manager, pytest.raises(ValueError, match="name the metric"):
        manager.best()
    with pytest.raises(ValueError, match="mode is 'highest'"):
        checkpoint(tmp_path, best="accuracy", mode="highest")


def test_after_a_return_to_an_earlier_step_its_branch_is_the_newest(tmp_path):
    """Neither dropped as the oldest nor passed over for the branch that was left."""
    with checkpoint(tmp_path, keep=2) as manager:
        for step in (10, 20):
            manager.save(step, box=Box(1.0))
    with checkpoint(tmp_path, keep=2) as manager:
        manager.save(11, box=Box(2.0))
        assert steps(tmp_path) == [11, 20]
        assert manager.latest() == 11
        manager.save(12, box=Box(2.0))
        assert steps(tmp_path) == [11, 12]


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path):
    with checkpoint(tmp_path, keep=2) as manager:
        manager.save(1, box=Box())
        newest = manager.save(2, box=Box())
        (newest / MANIFEST).write_text("{")
        manager.save(3, box=Box())
        assert steps(tmp_path) == [1, 3]


def test_every_bit_of_the_newest_counts(tmp_path):
    """A flipped bit anywhere: the one before is taken, or nothing of the meaning has changed."""
    with checkpoint(tmp_path) as manager:
        manager.save(1, box=Box(1.0), note="one")
        newest = manager.save(2, box=Box(2.0), note="two")
    files = sorted(path for path in newest.iterdir())
    assert [path.name for path in files] == ["box.npy", MANIFEST, "values.json"]
    choice = random.Random(3)
    taken = set()
    for path in files:
        content = path.read_bytes()
        for position in choice.sample(range(len(content)), min(60, len(content))):
            flipped = bytearray(content)
            flipped[position] ^= 1 << choice.randrange(8)
            path.write_bytes(flipped)
            box = Box()
            found = checkpoint(tmp_path).restore(box=box)
            assert (found["step"], found["note"], box.array[0]) in [
                (1, "one", 1.0),
                (2, "two", 2.0),
            ]
            assert path.name == MANIFEST or found["step"] == 1
            taken.add(found["step"])
        path.write_bytes(content)
    assert 1 in taken
    assert checkpoint(tmp_path).latest() == 2


@pytest.mark.parametrize("version", [0, 2])
def test_another_layout_is_named_not_read_and_not_removed(tmp_path, caplog, version):
    with checkpoint(tmp_path, keep=1) as manager:
        manager.save(1, box=Box(1.0))
    strange = tmp_path / "step-00000009"
    strange.mkdir()
    about = {"format": version, "hvdsync": "7.5", "files": {}, "step": 9}
    (strange / MANIFEST).write_text(json.dumps(about))
    with checkpoint(tmp_path, keep=1) as manager:
        with caplog.at_level(logging.WARNING):
            assert manager.latest() == 1
        assert f"layout version {version}" in caplog.text
        assert "hvdsync 7.5" in caplog.text
        manager.save(2, box=Box())
        assert steps(tmp_path) == [2, 9]


def test_the_manifest_tells_versions_world_epoch_and_content(tmp_path):
    with checkpoint(tmp_path) as manager:
        folder = manager.save(3, box=Box(), epoch=4, note="x")
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["step"], manifest["epoch"], manifest["world_size"]) == (3, 4, 1)
    assert (manifest["items"], manifest["sequence"]) == (["box"], 1)
    assert set(manifest["files"]) == {"box.npy", "values.json"}


def test_values_that_would_come_back_as_others_are_refused(tmp_path):
    with checkpoint(tmp_path) as manager:
        with pytest.raises(CheckpointError, match="the key 1 would come back as a string"):
            manager.save(1, table={1: "a"})
        with pytest.raises(CheckpointError, match="thing: object"):
            manager.save(1, thing=object())
        assert manager.latest() is None


class Own:
    """A per-rank object."""

    per_rank = True

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_per_rank_state_is_stored_plainly_and_comes_back(tmp_path):
    state = {
        "words": np.arange(3, dtype=np.uint32),
        "nested": [{"deep": np.array(2.5)}, None, "text", 2**70],
    }
    with checkpoint(tmp_path) as manager:
        folder = manager.save(1, own=Own(state), box=Box())
        found = manager.restore(own=Own(), box=Box())
    back = found["own"].state
    assert back["words"].dtype == np.uint32
    assert back["words"].tolist() == [0, 1, 2]
    assert back["nested"][0]["deep"] == 2.5
    assert back["nested"][1:] == [None, "text", 2**70]
    with np.load(folder / "per_rank.npz", allow_pickle=False) as stored:
        assert stored["000000"].tolist() == [0, 1, 2]
        assert len(json.loads(stored["tree.json"].tobytes())) == 1


@pytest.mark.parametrize("state", [{"a": object()}, {"a": np.array([object()])}, {3: 1}])
def test_per_rank_state_that_is_not_plain_is_refused(tmp_path, state):
    with checkpoint(tmp_path) as manager, pytest.raises(CheckpointError, match="per-rank object"):
        manager.save(1, own=Own(state))


def test_an_object_that_was_not_saved_is_named(tmp_path):
    with checkpoint(tmp_path) as manager:
        manager.save(1, box=Box())
        with pytest.raises(CheckpointError, match="holds box, but not own"):
            manager.restore(box=Box(), own=Own())
