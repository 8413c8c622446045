"""Arguments and configuration files become a ``TrainConfig``, or one sentence and exit code 2."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from hvdsync.comm.launch import LaunchInfo
from hvdsync.train import cli
from hvdsync.train.cli import parse
from hvdsync.train.config import TrainConfig
from hvdsync.train.options import flag

ALONE = LaunchInfo("none", 0, 1, 0, 1)
SECOND = LaunchInfo("horovodrun", 1, 2, 1, 2)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence with which these arguments are refused."""
    with pytest.raises(SystemExit) as end:
        parse(list(arguments), ALONE)
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Error: ") and output.err.count("\n") == 1
    return output.err


def test_no_arguments_give_the_defaults_of_the_dataclass() -> None:
    assert parse([], ALONE) == TrainConfig()


def test_every_field_can_be_given_as_an_option() -> None:
    given = {
        "framework": "keras",
        "model": "mlp",
        "dataset": "synthetic",
        "epochs": 7,
        "batch_size": 32,
        "seed": 5,
        "optimizer": "momentum",
        "lr": 0.25,
        "scale_lr": "linear",
        "warmup_epochs": 1.5,
        "accumulate": 2,
        "device": "cpu",
        "compression": "powersgd:2,100",
        "engine": "ddp",
        "update": "diloco",
        "staleness": 4,
        "period": 8,
        "update_warmup": 20,
        "fragments": 2,
        "outer_lr": 0.5,
        "outer_momentum": 0.8,
        "elastic": True,
        "commit_every": 3,
        "straggler_every": 7,
        "on_nonfinite": "skip",
        "on_divergence": "repair",
        "guard_every": 11,
        "wait_limit": 90.0,
        "dropout": 0.25,
        "augment": True,
        "checkpoint_dir": Path("somewhere"),
        "checkpoint_every": 50,
        "resume": True,
        "max_time": 90.0,
        "stop_code": 75,
        "log_dir": Path("logs"),
    }
    assert set(given) == {field.name for field in fields(TrainConfig)}
    arguments = []
    for name, value in given.items():
        arguments += [flag(name)] if value is True else [flag(name), str(value)]
    assert parse(arguments, ALONE) == TrainConfig(**given)  # type: ignore[arg-type]


def test_help_shows_every_option_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"], ALONE)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for field in fields(TrainConfig):
        assert len(re.findall(rf"  {flag(field.name)}(?![\w-])", shown)) == 1, field.name
    headings = [
        shown.index(group) for group in ("Model and data", "Optimizer", "Workers", "Output")
    ]
    assert headings == sorted(headings)
    assert shown.index("Optimizer") < shown.index("--scale-lr") < shown.index("Workers")


def test_other_ranks_keep_silent_about_help_and_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    for arguments, code in ((["--help"], 0), (["--epochs", "many"], 2), (["--nonsense"], 2)):
        with pytest.raises(SystemExit) as end:
            parse(arguments, SECOND)
        assert end.value.code == code
        assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs", "many"], "'--epochs': 'many' is not a valid whole number"),
        (["--epochs", "0"], "'--epochs': 0 is not in the range x>=1"),
        (["--lr", "0"], "'--lr': 0.0 is not in the range x>0"),
        (["--lr", "nan"], "'--lr': nan is not a finite number"),
        (["--lr", "inf"], "'--lr': inf is not a finite number"),
        (["--dropout", "1"], "'--dropout': 1.0 is not in the range 0<=x<1"),
        (["--checkpoint-every", "0"], "'--checkpoint-every': 0 is not in the range x>=1"),
        (["--stop-code", "256"], "'--stop-code': 256 is not in the range 0<=x<256"),
        (["--max-time", "soon"], "'--max-time': 'soon' is not a valid time"),
        (["--max-time", "0s"], "'--max-time': 0.0 is not in the range x>0"),
        (["--framework", "mxnet"], "'--framework': 'mxnet' is not one of"),
        (["--compression", "zip"], "'--compression': compression is 'zip'; expected one of none,"),
        (["--compression", "topk:2"], "'--compression': topk: ratio is 2.0; expected a share"),
        (["--dataset", "no/such/path"], "'no/such/path' is none of mnist, synthetic"),
        (["--epoch", "3"], "No such option '--epoch'. (Did you mean"),
        (["rubbish"], "unexpected extra argument (rubbish)"),
        (["--config", "missing.yaml"], "'missing.yaml' does not exist"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compression", "onebit", "--engine", "ddp"], "has buckets of its own"),
        (["--compression", "topk:0.01,0.9", "--optimizer", "momentum"], "it would count twice"),
    ],
)
def test_compression_that_makes_no_sense_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"Error: --compression {arguments[1]}: compression is ")
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "minutes"),
    [("90", 90), ("1.5", 1.5), ("45s", 0.75), ("90m", 90), ("2h", 120), ("1d", 1440)],
)
def test_a_time_is_minutes_or_has_a_unit(given: str, minutes: float) -> None:
    assert parse(["--max-time", given], ALONE).max_time == minutes


def test_a_named_folder_is_resumed_unless_it_is_said_otherwise() -> None:
    assert not parse([], ALONE).resumes
    assert parse(["--resume"], ALONE).resumes
    assert parse(["--checkpoint-dir", "here"], ALONE).resumes
    assert not parse(["--checkpoint-dir", "here", "--no-resume"], ALONE).resumes


def test_a_configuration_file_sets_options_and_arguments_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "epochs: 5\nbatch-size: 128\nwarmup_epochs: 0\nlr: 1e-2\nresume: true\ncompression: none\n"
    )
    config = parse(["--config", str(file), "--epochs", "2", "--no-resume"], ALONE)
    assert config == TrainConfig(
        epochs=2, batch_size=128, warmup_epochs=0.0, lr=0.01, resume=False, compression="none"
    )
    assert parse(["--config", str(file)], ALONE).resume is True


def test_an_empty_configuration_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n")
    assert parse(["--config", str(file)], ALONE) == TrainConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epocs: 3", "unknown option 'epocs'; did you mean 'epochs'?"),
        ("config: other.yaml", "unknown option 'config'"),
        ("epochs: 2.5", "'--epochs': '2.5' is not a valid whole number"),
        ("epochs:", "'--epochs': '' is not a valid whole number"),
        ("epochs: true", "'--epochs': 'true' is not a valid whole number"),
        ("scale-lr: cubic", "'--scale-lr': 'cubic' is not one of"),
        ("resume: perhaps", "'--resume': 'perhaps' is not a valid boolean"),
        ("lr: [0.1, 0.2]", "'lr' must be a single value"),
        ("- epochs", "expected lines like 'epochs: 3'"),
        ("epochs: 3: 4", "cannot be read"),
    ],
)
def test_a_mistake_in_a_configuration_file_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text + "\n")
    message = refusal(capsys, "--config", str(file))
    assert said in message
    assert str(file) in message


def test_options_are_settled_before_anything_with_threads_is_imported() -> None:
    program = (
        "import sys\n"
        "from hvdsync.train import cli\n"
        "from hvdsync.comm.launch import LaunchInfo\n"
        "cli.parse(['--epochs', '2'], LaunchInfo('none', 0, 1, 0, 1))\n"
        "loaded = {'numpy', 'torch', 'tensorflow', 'keras', 'horovod'} & set(sys.modules)\n"
        "sys.exit(' '.join(loaded) or 0)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
