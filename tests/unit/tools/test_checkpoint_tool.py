"""``python -m hvdsync checkpoint``: what it says of whole, damaged and hostile checkpoints."""

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hvdsync.checkpoint.contents import Tensor, tensors
from hvdsync.checkpoint.manifest import MANIFEST
from hvdsync.errors import CheckpointError
from tests.unit.checkpoint.arrays import Box, checkpoint
from tests.unit.checkpoint.test_checkpoint import Own

ROOT = Path(__file__).parents[3]
# As where none of the frameworks is installed.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tensorflow", "keras", "horovod"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
from hvdsync.tools.cli import main
main(["checkpoint", *sys.argv[1:]])
"""


def tool(*arguments):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "150", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture
def directory(tmp_path):
    with checkpoint(tmp_path) as manager:
        manager.save(1, box=Box(), epoch=1, accuracy=0.5)
        manager.save(2, box=Box(), own=Own({"words": np.zeros((3, 2), np.uint32)}), epoch=2)
    return tmp_path


def test_list_names_steps_and_what_they_hold_without_a_framework(directory):
    done = tool("list", directory)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["1", "1"], ["2", "2"]]
    assert lines[2][-2:] == ["box,", "own"]
    rows = json.loads(tool("list", "--json", directory).stdout)
    assert [(row["step"], row["ranks"], row["holds"]) for row in rows] == [
        (1, 1, ["box"]),
        (2, 1, ["box", "own"]),
    ]
    sizes = [path.stat().st_size for path in (directory / "step-00000001").iterdir()]
    manifest = (directory / "step-00000001" / MANIFEST).stat().st_size
    assert rows[0]["bytes"] == sum(sizes) - manifest


def test_verify_ends_with_1_and_names_what_is_damaged(directory):
    assert tool("verify", directory).returncode == 0
    path = directory / "step-00000002" / "box.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (directory / "step-00000001" / MANIFEST).unlink()
    done = tool("verify", directory)
    assert done.returncode == 1
    assert "file box.npy has" in done.stdout
    assert "it has no manifest.json" in done.stdout
    verdicts = json.loads(tool("verify", "--json", directory).stdout)
    assert sum(problem is not None for problem in verdicts.values()) == 2
    assert "it has no manifest.json" in tool("list", directory).stdout


def test_show_prints_values_and_arrays_of_the_newest_or_of_a_step(directory):
    shown = json.loads(tool("show", "--json", directory).stdout)
    assert (shown["step"], shown["values"]) == (2, {"epoch": 2})
    assert shown["tensors"]["per_rank.npz"] == [
        {"name": "rank.0.own.words", "shape": [3, 2], "dtype": "uint32"}
    ]
    text = tool("show", directory, "--step", 1).stdout
    assert "accuracy" in text
    assert "0.5" in text
    assert "rank.0.own.words" in tool("show", directory / "step-00000002").stdout
    done = tool("show", directory, "--step", 7)
    assert (done.returncode, done.stderr) == (
        1,
        f"Error: {directory} holds no step 7; there are: step-00000001, step-00000002\n",
    )


def test_a_directory_without_checkpoints_is_an_error(tmp_path):
    done = tool("verify", tmp_path)
    assert done.returncode == 1
    assert "holds no checkpoint" in done.stderr


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_in_a_file_of_pytorch_is_executed(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("model/data.pkl", pickle.dumps({"evil": Evil(str(tmp_path / "ran"))}))
    assert tensors(path) == []
    assert not (tmp_path / "ran").exists()


def test_files_of_pytorch_are_read_without_it(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.state[model[0].bias]["step"] = torch.tensor(3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": [1, None]}
    torch.save(state, tmp_path / "x.pt")
    assert tensors(tmp_path / "x.pt") == [
        Tensor("model.0.weight", (4, 3), "bfloat16"),
        Tensor("model.0.bias", (4,), "bfloat16"),
        Tensor("optimizer.state.1.step", (), "int64"),
    ]


def test_a_file_that_is_none_is_an_error_and_others_are_nothing(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"x.npz does not read"):
        tensors(tmp_path / "x.npz")
    (tmp_path / "x.json").write_text("{}")
    assert tensors(tmp_path / "x.json") is None
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros((2, 3), np.int16))
    (tmp_path / "y.npz").write_bytes(stream.getvalue())
    assert tensors(tmp_path / "y.npz") == [Tensor("a", (2, 3), "int16")]
