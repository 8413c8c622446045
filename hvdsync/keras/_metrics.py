"""Metrics of the whole data set from the metrics of each rank's part.

Local metric state and logs go in; values over the samples of all ranks come out, equal everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdsync.comm import verbs
from hvdsync.sync.variables import as_array


class Record:
    """One rank's metrics of one phase (training or validation): their state, and plain values.

    ``states`` holds, for each metric that can be pooled, its name and its variables' values;
    ``count`` is the number of samples behind the phase, 1 when nothing tells.
    """

    def __init__(self, model: Any) -> None:
        self.states: list[tuple[str, list[np.ndarray]]] = []
        self.count = 1.0
        for metric in model.metrics:
            arrays = [as_array(v) for v in metric.variables]
            if arrays and _is_additive(metric):
                self.states.append((metric.name, arrays))
        tracker = getattr(model, "_loss_tracker", None)
        if tracker is not None and float(as_array(tracker.count)) > 0:
            self.count = float(as_array(tracker.count))


def _is_additive(metric: Any) -> bool:
    """Whether state summed over ranks is the state of all samples together."""
    return all(getattr(v, "aggregation", None) == "sum" for v in metric.variables)


def pooled_results(model: Any, records: list[Record]) -> dict[str, float]:
    """Results of the model's metrics over all ranks' samples; the metrics keep their own state.

    ``records`` are those of all ranks. A mean is weighted by its counts, and curves such as the
    AUC are computed from the summed counts, not averaged.
    """
    own = {metric.name: metric for metric in model.metrics if metric.variables}
    before = {name: [as_array(v) for v in metric.variables] for name, metric in own.items()}
    touched = []
    try:
        for name, metric in own.items():
            states = [arrays for r in records for n, arrays in r.states if n == name]
            if not states or any(not _same_shapes(states[0], other) for other in states):
                continue
            touched.append(metric)
            for variable, *values in zip(metric.variables, *states, strict=True):
                variable.assign(np.sum(np.stack(values), axis=0, dtype=values[0].dtype))
        return _named_results(touched)
    finally:
        for metric in touched:
            for variable, value in zip(metric.variables, before[metric.name], strict=True):
                variable.assign(value)


def _same_shapes(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    return [a.shape for a in first] == [b.shape for b in second]


def _named_results(metrics: list[Any]) -> dict[str, float]:
    results: dict[str, float] = {}
    for metric in metrics:
        value = metric.result()
        named = value.items() if isinstance(value, dict) else [(metric.name, value)]
        results.update({name: to_float(v) for name, v in named})
    return results


def to_float(value: Any) -> float:
    """A Python number from a backend's scalar."""
    return float(value.detach().cpu() if hasattr(value, "detach") else value)


def gather(phases: dict[str, Record], logs: dict[str, Any]) -> list[tuple[dict[str, Any], Any]]:
    """(phases, logs) of every rank, in rank order. One pickled all-gather."""
    plain = {}
    for name, value in logs.items():
        try:
            plain[name] = to_float(value)
        except (TypeError, ValueError):
            continue  # not a number: stays as it is on this rank
    return verbs.allgather_object((phases, plain), "hvdsync.keras.metrics")


def global_logs(
    model: Any, everyone: list[tuple[dict[str, Any], dict[str, float]]], prefixes: dict[str, str]
) -> dict[str, float]:
    """Values over all ranks for every name that any rank logged.

    ``prefixes`` maps a phase to what its names begin with (``val_`` for validation). Values that
    are no metric's result are averaged with the phase's numbers of samples as weights.
    """
    values: dict[str, float] = {}
    for phase, prefix in prefixes.items():
        records = [phases[phase] for phases, _ in everyone if phase in phases]
        if records:
            pooled = pooled_results(model, records)
            values.update({prefix + name: value for name, value in pooled.items()})
    names = sorted({name for _, logs in everyone for name in logs})
    result = {}
    for name in names:
        if name in values:
            result[name] = values[name]
            continue
        phase = "validation" if name.startswith("val_") else "training"
        total = weight = 0.0
        for phases, logs in everyone:
            if name in logs:
                count = phases[phase].count if phase in phases else 1.0
                total, weight = total + count * logs[name], weight + count
        result[name] = total / weight
    return result
