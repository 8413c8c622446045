"""From arguments to a finished run: what has to be settled before a framework is imported.

In: argv and the launcher's environment. Out: exit code 0; 1 with one message; 2 for wrong options;
``--stop-code`` when the run was ended early.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import rich_click as click

from hvdsync.comm import threads
from hvdsync.comm.launch import LaunchInfo, detect
from hvdsync.errors import HvdsyncError, NonFiniteGradient, ReplicaMismatch
from hvdsync.sync.compression.choices import without_framework
from hvdsync.sync.options import check_combination, check_compression
from hvdsync.train.agreement import AgreedError
from hvdsync.train.chatter import without_greetings
from hvdsync.train.config import TrainConfig
from hvdsync.train.options import explain, make_command

_ALONE = LaunchInfo("none", rank=0, size=1, local_rank=0, local_size=1)
_GRACE_SECONDS = 2.0


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and end the process; ``argv`` defaults to the process's own."""
    launch = detect() or _ALONE
    config = parse(argv, launch)
    if refusal := _refuse(config, launch):
        _stop(f"Error: {refusal}", 2, tell=launch.rank == 0)
    try:
        code = train(config, launch)
    except (AgreedError, NonFiniteGradient, ReplicaMismatch) as error:
        _stop(f"Error: {error}", 1, tell=launch.rank == 0)  # all ranks have it
    except HvdsyncError as error:
        from hvdsync.guard.watch import watch

        watch.fail(error)
        _stop(f"Error: {error}", 1)
    except KeyboardInterrupt:
        if launch.rank == 0:
            click.echo("Stopped.", err=True)
        sys.exit(130)
    sys.exit(code)


def parse(argv: list[str] | None, launch: LaunchInfo) -> TrainConfig:
    """The run that the arguments ask for.

    Ends the process for ``--help`` (code 0) and for wrong arguments (code 2, one sentence); rank 0
    alone says so.
    """
    command = make_command()
    silence = contextlib.nullcontext() if launch.rank == 0 else _silence()
    try:
        with silence:
            result = command.main(argv, "python -m hvdsync.train", standalone_mode=False)
    except click.ClickException as error:
        _stop(f"Error: {explain(error)}", 2, tell=launch.rank == 0)
    except click.Abort:
        _stop("Stopped.", 130, tell=launch.rank == 0)
    if not isinstance(result, TrainConfig):
        sys.exit(result)
    return result


def _refuse(config: TrainConfig, launch: LaunchInfo) -> str:
    """What does not go together, in one sentence; empty where all does."""
    if config.elastic and not launch.elastic:
        return (
            "--elastic: this launch has a fixed number of workers; start it with "
            "`horovodrun --min-np N --max-np M ...`"
        )
    if config.engine == "ddp" and config.framework != "torch":
        return (
            f"--engine ddp: DistributedDataParallel is PyTorch's own, found --framework "
            f"{config.framework}; give --framework torch, or --engine horovod"
        )
    compressor = without_framework(config.compression)
    try:
        check_combination(
            config.rule,
            engine=config.engine,
            compression=compressor,
            elastic=config.elastic,
        )
    except ValueError as error:
        return f"--update {config.update}: {error}"
    if config.update == "async" and launch.size > 1 and launch.launcher == "horovodrun":
        return (
            "--update async: workers share the weights through MPI's windows, found horovodrun "
            f"over Gloo; start it with `horovodrun --mpi -np {launch.size} ...`"
        )
    if config.engine == "ddp" and launch.elastic:
        return "--engine ddp: its number of workers is fixed; start it with `horovodrun -np N ...`"
    try:
        check_compression(
            compressor,
            engine=config.engine,
            elastic=config.elastic,
            momentum=config.momentum,
        )
    except ValueError as error:
        return f"--compression {config.compression}: {error}"
    return ""


def train(config: TrainConfig, launch: LaunchInfo) -> int:
    """Load data and framework, and train; collective from ``init`` on. Gives the exit code."""
    threads.cap(os.environ, threads.share_of_cores(*threads.available_cores(), launch.local_size))
    _quieten(launch.rank)
    # Whatever every rank of a node finds wrong alike is told by the first of them.
    with _told_once_per_node(launch):
        worker_module = _find_worker(config.framework)
        from hvdsync.data.datasets import load
        from hvdsync.train.models import make_network

        dataset = load(config.dataset, progress=launch.rank == 0, seed=config.seed)
        network = make_network(
            config.model, dataset.image_shape, dataset.classes, dropout=config.dropout
        )
        with without_greetings() if config.framework != "torch" else contextlib.nullcontext():
            module = importlib.import_module(worker_module)
        engine = {"engine": config.engine} if config.framework == "torch" else {}
        module.init(wait_limit=config.wait_limit, **engine)

    from hvdsync.train.listener import Stopped
    from hvdsync.train.runs import run, run_elastically
    from hvdsync.train.worker import Job

    job = Job(config, network, dataset)
    outcome = (run_elastically if config.elastic else run)(module, job)
    return config.stop_code if isinstance(outcome, Stopped) else 0


def _find_worker(framework: str) -> str:
    if importlib.util.find_spec(framework) is None:
        raise HvdsyncError(
            f"--framework {framework}: {framework} is not installed here; install it with "
            f"`pip install 'hvdsync[{framework}]'`, or give another --framework"
        )
    if framework == "tensorflow":
        # Its models are Keras models, which must compute with TensorFlow whatever else is set.
        os.environ["KERAS_BACKEND"] = "tensorflow"
    return f"hvdsync.train.{framework}_worker"


def _quieten(rank: int) -> None:
    """Rank 0 reports; the others only what goes wrong."""
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, format="%(message)s")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if rank == 0 else "3")


@contextlib.contextmanager
def _told_once_per_node(launch: LaunchInfo) -> Iterator[None]:
    try:
        yield
    except HvdsyncError as error:
        _stop(f"Error: {error}", 1, tell=launch.local_rank == 0)


def _silence() -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO())


def _stop(message: str, code: int, *, tell: bool = True) -> NoReturn:
    if tell:
        click.echo(message, err=True)
    else:
        _let_another_speak(code)
    sys.exit(code)


def _let_another_speak(code: int) -> None:
    # A launcher ends all ranks as soon as one has failed: the one with the message goes first.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
    time.sleep(_GRACE_SECONDS)
