"""``python -m hvdsync data coverage`` prints how often each sample is read."""

from __future__ import annotations

import pytest

from hvdsync.tools import cli


def coverage(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, ...]]:
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "coverage", *arguments])
    output = capsys.readouterr()
    assert end.value.code == 0, output.err
    rows = [line.split("│") for line in output.out.splitlines()]
    return [tuple(cell.strip() for cell in row[1:4]) for row in rows if len(row) == 5]


def test_the_samples_of_each_count_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert coverage(capsys, "12", "-n", "4") == [("1", "12", "0, 1, 2, 3, 4")]
    assert coverage(capsys, "13", "-n", "4", "--no-shuffle") == [
        ("1", "10", "3, 4, 5, 6, 7"),
        ("2", "3", "0, 1, 2"),
    ]
    resumed = ("--resume", "3:2", "--resume", "4:5", "--batch-size", "2", "--epochs", "3")
    assert coverage(capsys, "99", "-n", "4", "--uneven", "exact", *resumed) == [
        ("3", "99", "0, 1, 2, 3, 4")
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["12", "--resume", "3-3"], 2, "'3-3' is not like 120:3"),
        (["12", "--resume", "20:3"], 1, "have read the whole epoch"),
        (["0"], 2, "0 is not in the range"),
    ],
)
def test_what_makes_no_sense_is_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["data", "coverage", *arguments])
    assert end.value.code == code
    assert said in " ".join(capsys.readouterr().err.split())
