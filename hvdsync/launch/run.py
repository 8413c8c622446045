"""``hvdsync.run``: a function and a number of ranks in, what each rank returned out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from hvdsync.launch.call import Call, results
from hvdsync.launch.options import Options


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    on: Literal["local", "spark", "ray"] = "local",
    *,
    env: Mapping[str, str] | None = None,
    over: Literal["gloo", "mpi"] | None = None,
    start_timeout_seconds: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    cpus_per_rank: int | None = None,
    gpus_per_rank: int | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``np`` ranks, and give back what each returned, by rank.

    The function calls ``init()`` of a front door itself, as a script does. It may be one of a
    notebook or of ``__main__``, which travels by value with what it refers to; frameworks are best
    imported in it. Results must be picklable. What ranks write is written here as it comes.

    ``on="local"``: new processes of this machine, under ``horovodrun``.
    ``on="spark"``: tasks of the ``SparkSession`` of this process, through ``horovod.spark``; each
    has the GPUs that Spark gives its task. ``on="ray"``: actors of the Ray cluster that this
    process is connected to, or else of one that is started here and stopped after; inside a
    placement group they are placed in it, otherwise in a new one.

    ``env``: more environment variables for each rank. ``over``: what control and host data travel
    over, "gloo" unless given; "mpi" with "local" alone. ``start_timeout_seconds``: how long ranks
    may take to start. ``min_np``, ``max_np``: an elastic job, with "spark" and "ray"; ``fn`` then
    trains under ``hvd.elastic.run``, and there is a result for each rank that finished.
    ``cpus_per_rank`` (1) and ``gpus_per_rank`` (0): what Ray sets aside.

    Raises :class:`hvdsync.errors.RunFailed` when a rank fails: the other ranks are ended, its
    message is the first failing rank's own traceback, and its cause that rank's exception.
    Raises :class:`hvdsync.errors.LaunchError` when ranks cannot be started there.
    """
    options = Options(
        np=np,
        over=over,
        start_timeout_seconds=start_timeout_seconds,
        min_np=min_np,
        max_np=max_np,
        cpus_per_rank=cpus_per_rank,
        gpus_per_rank=gpus_per_rank,
    )
    options.check(on)
    call = Call.of(fn, args, kwargs or {}, env or {})
    if on == "local":
        from hvdsync.launch.on_local import start
    elif on == "spark":
        from hvdsync.launch.on_spark import start
    else:
        from hvdsync.launch.on_ray import start
    return results(start(call, options))
