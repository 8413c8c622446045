"""What update rules have to come to, in NumPy alone: a rule in, each rank's parameters after each
step out.

A linear model, the mean square of its error, and SGD with momentum on every rank.
"""

import numpy as np

RATE, MOMENTUM = 0.1, 0.9
STEPS = 9


def initial():
    """Weight (3, 2) and bias (2,): one fragment each, when there are two."""
    rng = np.random.default_rng(7)
    return [rng.normal(size=(3, 2)), rng.normal(size=2)]


def batch(rank, step):
    """What a rank learns from at a step, counted from 1: x (4, 3) and y (4, 2), float32."""
    rng = np.random.default_rng([rank, step])
    return rng.normal(size=(4, 3)).astype("f"), rng.normal(size=(4, 2)).astype("f")


def gradients(parameters, x, y):
    weight, bias = parameters
    error = 2 * (x @ weight + bias - y) / y.size
    return [x.T @ error, error.sum(0)]


def trajectory(
    size,
    period,
    *,
    outer=None,
    warmup_steps=0,
    fragments=1,
    extra_meetings=(),
    steps=STEPS,
):
    """``[step][rank]`` of parameters, from 0. ``outer`` is (learning rate, momentum) of DiLoCo.

    After the steps in ``extra_meetings`` all meet that did not meet just then, and go on with the
    momentum of rank 0. One rank alone is never unequal to another, and has none.
    """
    extra_meetings = extra_meetings if size > 1 else ()
    parameters = [initial() for _ in range(size)]
    velocity = [[np.zeros_like(p) for p in initial()] for _ in range(size)]
    anchor, outer_velocity = initial(), [np.zeros_like(p) for p in initial()]
    history = [[[p.copy() for p in own] for own in parameters]]
    for step in range(1, steps + 1):
        found = [gradients(parameters[r], *batch(r, step)) for r in range(size)]
        if step <= warmup_steps:
            mean = [sum(parts) / size for parts in zip(*found, strict=True)]
            found = [mean] * size
        for rank in range(size):
            for i in range(2):
                velocity[rank][i] = MOMENTUM * velocity[rank][i] + found[rank][i]
                parameters[rank][i] = parameters[rank][i] - RATE * velocity[rank][i]
        if step == warmup_steps:
            anchor = [p.copy() for p in parameters[0]]
        local = step - warmup_steps
        for i in range(2):
            fragment = i if fragments == 2 else 0
            due = local > 0 and (local + fragment * period // fragments) % period == 0
            if not due and not (local > 0 and step in extra_meetings):
                continue
            mean = sum(parameters[rank][i] for rank in range(size)) / size
            if outer is not None:
                rate, momentum = outer
                difference = anchor[i] - mean
                outer_velocity[i] = momentum * outer_velocity[i] + difference
                mean = anchor[i] - rate * (difference + momentum * outer_velocity[i])
                anchor[i] = mean
            for rank in range(size):
                parameters[rank][i] = mean
        if step in extra_meetings:
            velocity = [[v.copy() for v in velocity[0]] for _ in range(size)]
        history.append([[p.copy() for p in own] for own in parameters])
    return history


# Arguments of a rule, and of the trajectory that it has to follow.
RULES = {
    "local SGD": ("LocalSGD", {"period": 3}),
    "after a warm-up": ("LocalSGD", {"period": 2, "warmup_steps": 3}),
    "in fragments": ("LocalSGD", {"period": 4, "fragments": 2}),
    "DiLoCo": ("DiLoCo", {"period": 3}),
    "all of it": (
        "DiLoCo",
        {
            "period": 4,
            "outer_lr": 0.5,
            "outer_momentum": 0.8,
            "warmup_steps": 2,
            "fragments": 2,
        },
    ),
}


def golden(name, size, **more):
    """The trajectory of one of ``RULES``."""
    kind, options = RULES[name]
    options = {**options, **more}
    rate = options.pop("outer_lr", 0.7), options.pop("outer_momentum", 0.9)
    return trajectory(size, outer=rate if kind == "DiLoCo" else None, **options)
