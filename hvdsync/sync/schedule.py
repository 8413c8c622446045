"""Learning rate against the number of workers: a base rate or a step goes in, a rate or factor out.

Counted in optimizer steps, so that one schedule serves PyTorch, TensorFlow and Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hvdsync.comm import verbs


def scale_learning_rate(lr: float, rule: Literal["linear", "sqrt"] | None = "linear") -> float:
    """The rate for the global batch of all workers, from the rate ``lr`` tuned for one.

    ``linear`` multiplies by the number of workers (Goyal et al., arXiv:1706.02677), ``sqrt`` by
    its square root (Krizhevsky, arXiv:1404.5997), None leaves it. Nothing travels.
    """
    workers = verbs.size()
    if rule is None:
        return lr
    if rule == "linear":
        return lr * workers
    if rule == "sqrt":
        return lr * workers**0.5
    raise ValueError(f"scale_learning_rate: rule is {rule!r}; expected 'linear', 'sqrt' or None")


def warmup(
    steps: int,
    *,
    start: float | None = None,
    after: Callable[[int], float] | None = None,
) -> Callable[[int], float]:
    """Gradual warm-up (arXiv:1706.02677): a function from optimizer step to a factor of the rate.

    The factor rises in a straight line from ``start`` (default: 1 / number of workers, the rate
    of one worker) at step 0 to 1 at step ``steps``; beyond, it is ``after(step - steps)``, or 1.
    It depends on nothing but the step, so a resumed run follows the same curve. Give it to
    ``torch.optim.lr_scheduler.LambdaLR``, to ``hvdsync.keras.callbacks``' schedule callback, or
    multiply a rate by it. Nothing travels. Raises ``ValueError`` when ``steps`` is negative.
    """
    if steps < 0:
        raise ValueError(f"warmup: steps is {steps}; expected 0 or more")
    first = 1 / verbs.size() if start is None else start

    def factor(step: int) -> float:
        if step < steps:
            return first + (1 - first) * step / steps
        return 1.0 if after is None else after(step - steps)

    return factor
