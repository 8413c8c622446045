"""``plan`` beside measurements of ``bench link``, and the command as users start it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from hvdsync.errors import HvdsyncError
from hvdsync.sync.compression.exchange import Part
from hvdsync.tools import cli
from hvdsync.tools.bench.link import OnLink, Settings
from hvdsync.tools.plan import check
from hvdsync.tools.plan.network import Network
from hvdsync.tools.plan.payload import Bucket
from hvdsync.tools.plan.predict import Cost, Machine

BUCKET = Bucket((Part("0", (996,)),))
TIMES = {
    "compute only": [1.0, 1.0, 1.0],
    "synchronous": [5.4, 5.5, 5.6],
    "synchronous, bf16": [2.4, 2.4, 2.4],
    "local SGD, period 4": [1.0, 1.9, 3.0],
    "raw Horovod": [6.0, 6.0, 6.0],
}


def on_link(rate: float | None, carried: float, call: float = 0.0) -> OnLink:
    late = call + 0.2
    return OnLink(rate, carried, late, call, 0.0, 996, TIMES, dict.fromkeys(TIMES, 1.0))


def keep(path: Path, *links: OnLink, model: str = "linear") -> Path:
    content = {
        "environment": {},
        "settings": asdict(Settings(model=model)),
        "links": [asdict(link) for link in links],
    }
    path.write_text(json.dumps(content))
    return path


def test_rows_are_compared_at_what_the_link_carried_and_the_machine_was_worth():
    # Half the compute time today, so that compressing cost twice as much then.
    machine = Machine(0.5, {"none": Cost(0, 0), "bf16": Cost(1e-5, 2e-5)}, 0, 0, 2)
    network = Network(None, 0.0, 1.0, 8e9)
    rows = check.compare(on_link(1e4, 8e3), machine, [BUCKET], network)
    # 1 s and 4,000 bytes at a kilobyte per second; twice 1,000 bytes, and 0.12 s doubled.
    assert [row.choice.name for row in rows] == [
        "synchronous",
        "synchronous, bf16",
        "local SGD, period 4",
    ]
    predicted = [1 + 4.2, 1 + 0.08 + 2.2 + 0.16, 1 + 4.2 / 4]
    assert [row.predicted for row in rows] == pytest.approx(predicted)
    assert [row.verdict for row in rows] == ["", "beyond 15%", "noise"]
    table = check.table(on_link(1e4, 8e3), rows)
    assert table.rows[0] == ("synchronous", "5500.0 (5400.0-5600.0)", "5200.0", "-5%", "")
    assert table.rows[1][3:] == ("+43%", "beyond 15%")
    assert table.notes[0].startswith("2 of 3 are within 15%.")


def test_a_measurement_covers_its_model_two_workers_and_the_rates_between(tmp_path):
    kept = check.Kept.read(keep(tmp_path / "link.json", on_link(1e8, 9e7), on_link(1e9, 9e8)))
    assert kept.covers("linear", 5e8, 2) and kept.covers("linear", 1e8, 2)
    assert not kept.covers("linear", 1e7, 2) and not kept.covers("linear", 1e10, 2)
    assert not kept.covers("linear", None, 2)
    assert not kept.covers("linear", 5e8, 3) and not kept.covers("mlp", 5e8, 2)


def test_calls_and_the_rate_within_a_host_are_taken_from_a_measurement(tmp_path):
    links = on_link(1e8, 9e7, 0.3), on_link(None, 2e9, 0.5)
    kept = check.Kept.read(keep(tmp_path / "link.json", *links))
    tuned = kept.calibrated(Network(1e12, 0.0, 1.0, 8e9))
    assert tuned.call_seconds == pytest.approx(0.3) and tuned.skew_seconds == pytest.approx(0.2)
    assert tuned.local_carried == 2e9


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"links": [1], "settings": {"model": "mlp"}}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(HvdsyncError, match=r"other.json is not what .* keeps in link.json"):
        check.Kept.read(tmp_path / "other.json")


def test_a_measurement_of_an_unknown_model_is_refused(tmp_path):
    path = keep(tmp_path / "link.json", on_link(1e8, 9e7), model="giant")
    with pytest.raises(HvdsyncError, match="is of model 'giant' and 1 link"):
        check.Kept.read(path)


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", *arguments])
    return end.value.code


def test_the_command_predicts_marks_and_compares(tmp_path, capsys):
    path = keep(tmp_path / "link.json", on_link(1e8, 9e7, 0.001))
    options = ("--model", "linear", "--compute-ms", "10", "--workers", "2,8", "--check", str(path))
    assert run(*options, "--link", "100Mbit,25Gbit", "--out", str(tmp_path / "out")) == 0
    text = capsys.readouterr().out
    assert "linear: 7,850 parameters" in text and "10.00 ms of computing" in text
    for row in ("100 Mbit/s, 2 ", "100 Mbit/s, 8*", "25 Gbit/s, 2*", "25 Gbit/s, 8*"):
        assert f"│ {row}" in text
    assert "Breaks even at" in text and "Checked: 2 workers, 100 Mbit/s" in text
    kept = json.loads((tmp_path / "out" / "plan.json").read_text())
    first = kept["predictions"][0]
    assert (first["link"], first["workers"], first["extrapolated"]) == ("100 Mbit/s", 2, False)
    told = first["choices"]["synchronous"]
    # Two flags for each of two parameters, two for the bucket.
    assert told["sent_bytes"] == 4 * (7850 + 6)
    assert told["seconds"] > 0.01 + 8 * 4 * 7856 / 9.5e7
    assert told["efficiency"] == pytest.approx(0.01 / told["seconds"])
    assert kept["checked"]["100 Mbit/s"]["synchronous"]["measured"] == 5.5
    assert (tmp_path / "out" / "plan.html").exists()


def test_without_a_measurement_it_says_how_to_make_one(capsys):
    assert run("--model", "linear", "--compute-ms", "1", "--workers", "4", "--link", "1G") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "python -m hvdsync bench link --link 100Mbit" in text
    assert "--check results/link.json` compares" in text


def test_wrong_numbers_are_told(capsys):
    assert run("--workers", "2,many") == 2
    assert "found '2,many'; expected whole numbers" in " ".join(capsys.readouterr().err.split())
    assert run("--link", "quick") == 2
    assert "expected a rate such as 100Mbit" in " ".join(capsys.readouterr().err.split())
