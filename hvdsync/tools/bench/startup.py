"""From the launch to the first step: with hvdsync, and with Horovod as it was published.

Launches in turn; the times at which the last rank came from one point to the next.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hvdsync.tools.bench import environment, launched, startup_rank
from hvdsync.tools.bench.contenders import HVDSYNC, RAW
from hvdsync.tools.bench.ratios import paired
from hvdsync.tools.bench.report import Chart, Report, Table
from hvdsync.tools.horovod_build.patches import RECORD
from hvdsync.tools.horovod_build.source import fetch_sdist, unpack

TRAIN = "hvdsync.train"
PARTS = ("launch", "import", "init", "first step")
_SECONDS = 120


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench startup --help``."""

    framework: str = "torch"
    workers: int = 2
    rounds: int = 6


def measure(settings: Settings) -> Report:
    """Launch in turns; raises :class:`HvdsyncError` when a launch fails."""
    taken: dict[str, list[dict[str, float]]] = {HVDSYNC: [], RAW: []}
    trained: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hvdsync-startup-") as name:
        folder = Path(name)
        published = publish(folder / "published", settings.framework)
        for i in range(settings.rounds):
            for contender, runs in taken.items():
                raw = contender == RAW
                marks = folder / f"{i}-{'raw' if raw else 'hvdsync'}"
                marks.mkdir()
                runs.append(_reach_a_step(settings, marks, published if raw else None))
            trained.append(_train(settings, folder / f"{i}-train"))
    return make_report(settings, taken, trained)


def publish(folder: Path, framework: str) -> Path:
    """Horovod's Python files as they were published, around the extension that is built here.

    A folder for ``PYTHONPATH``, with the extension for one framework, as most have it: its launcher
    imports all that it was built for. Raises :class:`BuildError` where the source cannot be had.
    """
    import horovod

    installed = Path(horovod.__file__).parent
    source = unpack(fetch_sdist(), folder)
    package = source / "horovod"
    for extension in (installed / framework).glob("*.so"):
        (package / extension.relative_to(installed)).symlink_to(extension)
    facts = json.loads((installed / "metadata.json").read_text())
    facts.pop(RECORD, None)
    (package / "metadata.json").write_text(json.dumps(facts))
    return source


def _reach_a_step(settings: Settings, marks: Path, published: Path | None) -> dict[str, float]:
    which = "hvdsync" if published is None else "raw"
    program = [startup_rank.__file__, settings.framework, which, str(marks)]
    started = time.time()
    _launch(settings, program, published)
    of_ranks = [json.loads(file.read_text()) for file in marks.iterdir()]
    # Of the rank that came last to each point.
    last = [started, *map(max, zip(*of_ranks, strict=True))]
    return dict(zip(PARTS, (b - a for a, b in pairwise(last)), strict=True))


def _train(settings: Settings, log: Path) -> float:
    """Seconds until the train command is about to take its first step."""
    program = ["-m", TRAIN, "--framework", settings.framework, "--model", "linear"]
    program += ["--dataset", "synthetic", "--epochs", "1", "--max-time", "1s"]
    program += ["--checkpoint-dir", str(log / "checkpoints"), "--log-dir", str(log)]
    started = time.time()
    _launch(settings, program)
    first, *_ = (log / "events.jsonl").read_text().splitlines()
    return float(json.loads(first)["time"]) - started


def _launch(settings: Settings, program: Sequence[str], published: Path | None = None) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if published is not None:
        # The extensions look for MPI from where they were installed.
        for variable, path in (
            ("PYTHONPATH", str(published)),
            ("LD_LIBRARY_PATH", str(Path(sys.prefix, "lib"))),
        ):
            env[variable] = os.pathsep.join(filter(None, (path, env.get(variable))))
    # The command horovodrun, of the Horovod that comes first on the path.
    command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np"]
    command += [str(settings.workers), sys.executable, *program]
    launched.finish(command, "bench startup: a launch", _SECONDS, env)


def make_report(
    settings: Settings,
    taken: Mapping[str, Sequence[Mapping[str, float]]],
    trained: Sequence[float],
) -> Report:
    """The report of seconds by what was started, round and part."""
    wholes = {name: [sum(run.values()) for run in runs] for name, runs in taken.items()}
    ratios = {
        HVDSYNC: paired(wholes[HVDSYNC], wholes[RAW]),
        TRAIN: paired(trained, wholes[RAW]),
    }
    rows = [
        [
            name,
            *(f"{median(run[part] for run in runs):.2f}" for part in PARTS),
            f"{median(wholes[name]):.2f}",
            str(ratios.get(name, "1")),
        ]
        for name, runs in taken.items()
    ]
    rows.append([TRAIN, *[""] * len(PARTS), f"{median(trained):.2f}", str(ratios[TRAIN])])
    about = (
        f"Seconds until the last of {settings.workers} worker(s) came to each point, "
        f"{settings.framework}; medians of {settings.rounds} round(s) in turn. Raw Horovod is as "
        "it was published, launcher included, around the extension that is built here; the train "
        "command, with its log, is timed until it is about to step."
    )
    charted: dict[str, list[float | None]] = {
        name: [median(run[part] for run in runs) for part in PARTS] for name, runs in taken.items()
    }
    return Report(
        "startup",
        [about],
        {
            **environment.describe(framework=settings.framework),
            "ranks": settings.workers,
            "ranks per core": round(settings.workers / environment.cores(), 2),
            "threads per rank": 1,
            "launch": "horovodrun over Gloo",
        },
        [
            Table(
                "From the launch to the first step, s",
                ["", *PARTS, "in all", f"x {RAW}"],
                rows,
            )
        ],
        [Chart("Seconds", "bars", list(PARTS), charted)],
        {
            "settings": vars(settings),
            "seconds": {name: [dict(run) for run in runs] for name, runs in taken.items()},
            "seconds of the train command": list(trained),
            "over raw Horovod": {name: ratio.as_dict() for name, ratio in ratios.items()},
        },
    )
