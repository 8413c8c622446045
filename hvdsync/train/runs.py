"""One training run, in a fixed world or an elastic one.

The module of a worker and a job go in; what the run came to, or why it stopped, comes out.
"""

from __future__ import annotations

from dataclasses import asdict
from types import ModuleType
from typing import Any

from hvdsync.comm import verbs
from hvdsync.comm.comparison import require_equal
from hvdsync.train.agreement import together
from hvdsync.train.config import TrainConfig
from hvdsync.train.directories import choose_directory
from hvdsync.train.keeper import Position
from hvdsync.train.listener import Everyone, Listener, Stopped, Summary
from hvdsync.train.loop import Loop, Standpoint
from hvdsync.train.worker import Job


def run(module: ModuleType, job: Job) -> Summary | Stopped:
    """Train on the ranks that were started; collective.

    Raises ``RankMismatch`` on every rank when their settings or data sets differ, as they may when
    hosts have configuration files of their own.
    """
    _compare_settings(job)
    directory = choose_directory(job.config)
    worker = together(lambda: module.worker(job))
    listener = together(lambda: make_listener(job.config))
    try:
        return Loop(job, worker, directory, listener).run()
    finally:
        listener.close()


def _compare_settings(job: Job) -> None:
    settings = asdict(job.config)
    for of_one_host in ("log_dir", "checkpoint_dir"):
        del settings[of_one_host]
    samples = {
        "training samples": len(job.dataset.x_train),
        "test samples": len(job.dataset.x_test),
    }
    require_equal(
        "settings of the run",
        {**settings, **samples},
        "Give every rank the same options, configuration file and data set",
    )


def run_elastically(module: ModuleType, job: Job) -> Summary | Stopped:
    """Train on the ranks that there are, while they are lost and join.

    Between commits a change of the world takes the run back to the last one: model, optimizer and
    place in the data, so that each sample is trained on once in the run that remains.
    """
    # Alone: a worker that joins makes its model while the others train.
    worker = module.worker(job)
    state = worker.elastic_state(directory=None, standpoint=None)
    listeners: list[Listener] = []

    def commit(standpoint: Standpoint) -> None:
        # Plain values, which do not change with the loop's own.
        state.standpoint = (asdict(standpoint.position), standpoint.sums, dict(standpoint.data))
        state.commit()

    @module.run_elastically
    def train(state: Any) -> Summary | Stopped:
        if state.directory is None:
            state.directory = choose_directory(job.config)
        if not listeners and verbs.rank() == 0:
            listeners.append(make_listener(job.config))
        start = None
        if state.standpoint is not None:
            position, sums, data = state.standpoint
            start = Standpoint(Position(**position), sums, data)
        listener = Everyone(*listeners)
        return Loop(job, worker, state.directory, listener, commit=commit, start=start).run()

    try:
        return train(state)
    finally:
        for listener in listeners:
            listener.close()


def make_listener(config: TrainConfig) -> Listener:
    """Who shows and logs the run, on rank 0; nobody elsewhere."""
    if verbs.rank() != 0:
        return Everyone()
    from hvdsync.train.progress import make_display

    display = make_display()
    if config.log_dir is None:
        return display
    from hvdsync.train.events import EventLog

    return Everyone(display, EventLog(config.log_dir))
