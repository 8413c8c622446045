"""Ranks as actors of a Ray cluster, through ``horovod.ray``: a call in, each rank's outcome out."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdsync.errors import LaunchError, RunFailed
from hvdsync.launch.call import Call, Outcome, attempt
from hvdsync.launch.options import Options

_START_SECONDS = 300
#: For ranks whose neighbour has failed: time to say what they know.
_LINGER_SECONDS = 10.0
_POLL_SECONDS = 1.0
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def start(call: Call, options: Options) -> list[Outcome]:
    """Run the call on all ranks; Ray itself forwards what they write."""
    for package in ("ray", "horovod"):
        if importlib.util.find_spec(package) is None:
            raise LaunchError(
                f"hvdsync.run(on='ray') needs {package}, which is not installed; run "
                '`pip install "hvdsync[ray]"` and `python -m hvdsync build-horovod`'
            )
    with _cluster(options):
        import ray
        from horovod.ray import RayExecutor

        seconds = options.start_timeout_seconds or _START_SECONDS
        settings = RayExecutor.create_settings(timeout_s=seconds, placement_group_timeout_s=seconds)
        gpus = options.gpus_per_rank or 0
        resources = {
            "cpus_per_worker": _cpus(options),
            "use_gpu": gpus > 0,
            "gpus_per_worker": gpus or None,
        }
        if options.elastic:
            if sum(node["Alive"] for node in ray.nodes()) == 1:
                # Horovod would wait for a second host, to look for the interface between them.
                settings.nics = {_LOOPBACK}
            executor = RayExecutor(
                settings,
                min_workers=options.min_np or options.np,
                max_workers=options.max_np or options.np,
                elastic_timeout=seconds,
                **resources,
            )
            executor.start(extra_env_vars=dict(call.environ))
            try:
                return list(executor.run(_on_elastic_rank, args=[call]))
            except RuntimeError as error:
                raise RunFailed(f"{error}; what each rank raised is in the output above") from error
        executor = RayExecutor(settings, num_workers=options.np, **resources)
        try:
            executor.start(extra_env_vars=dict(call.environ))
        except TimeoutError as error:
            raise LaunchError(f"hvdsync.run: Ray did not place the ranks: {error}") from error
        try:
            return _attend(executor.run_remote(_on_rank, args=[call]), options.np)
        finally:
            executor.shutdown()


def _cpus(options: Options) -> int:
    return 1 if options.cpus_per_rank is None else options.cpus_per_rank


def _on_rank(call: Call) -> Outcome:
    from hvdsync.guard.watch import watch

    outcome, error = attempt(call, int(os.environ["HOROVOD_RANK"]))
    if error is not None:
        watch.fail(error)
    return outcome


def _on_elastic_rank(call: Call) -> Outcome:
    outcome, error = attempt(call, int(os.environ["HOROVOD_RANK"]))
    if error is not None:
        raise error
    return outcome


def _attend(references: list[Any], size: int) -> list[Outcome]:
    """The outcomes of all ranks, or of those that came soon after the first that failed."""
    import ray

    waiting = {reference: rank for rank, reference in enumerate(references)}
    outcomes: list[Outcome] = []
    lost: RunFailed | None = None
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
        for reference in done:
            rank = waiting.pop(reference)
            try:
                outcomes.append(ray.get(reference))
                failed = outcomes[-1].failure is not None
            except ray.exceptions.RayError as error:
                failed = True
                if lost is None:
                    lost = RunFailed(f"rank {rank} of {size} ended without a word: {error}")
                    lost.rank = rank
            if failed and deadline is None:
                deadline = time.monotonic() + _LINGER_SECONDS
    told = [o for o in outcomes if o.failure is not None and not o.failure.follows]
    if lost is not None and not told:
        raise lost
    return outcomes


@contextmanager
def _cluster(options: Options) -> Iterator[None]:
    """The cluster that this process is connected to, or else one of its own."""
    import ray

    if ray.is_initialized():
        yield
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init()
    else:
        # Ranks may share cores, as they do under horovodrun.
        cores = max(os.cpu_count() or 1, options.np * _cpus(options))
        ray.init(address="local", num_cpus=cores, include_dashboard=False)
    try:
        yield
    finally:
        ray.shutdown()
