"""Everything that can be chosen about a training run: names, types, defaults, limits and help.

The command line, the configuration file and the run all read this one dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvdsync.sync.update_rules import Asynchronous, DiLoCo, LocalRule, LocalSGD, Synchronous

MODEL, OPTIMIZER, WORKERS, OUTPUT = "Model and data", "Optimizer", "Workers", "Output"


def about(
    help: str,
    group: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str | None = None,
    shown_default: str | None = None,
) -> dict[str, Any]:
    """What the option of a field and its help need.

    ``minimum`` is the least value, ``above`` one that the value must exceed, ``below`` one that it
    must not reach. ``shown_default`` is what the help says in place of the default.
    """
    return {
        "help": help,
        "group": group,
        "minimum": minimum,
        "above": above,
        "below": below,
        "metavar": metavar,
        "shown_default": shown_default,
    }


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Field ``scale_lr`` is option ``--scale-lr``, and key ``scale-lr`` of a
    configuration file."""

    framework: Literal["torch", "tensorflow", "keras"] = field(
        default="torch",
        metadata=about("What computes; Keras on the backend that it is configured for.", MODEL),
    )
    model: Literal["linear", "mlp", "cnn"] = field(
        default="cnn", metadata=about("The network.", MODEL)
    )
    dataset: str = field(
        default="mnist",
        metadata=about(
            "[b]mnist[/], [b]synthetic[/], or the path of an .npz file or folder with x_train, "
            "y_train, x_test and y_test.",
            MODEL,
            metavar="NAME|PATH",
        ),
    )
    epochs: int = field(
        default=3, metadata=about("How often the training set is read.", MODEL, minimum=1)
    )
    batch_size: int = field(
        default=64, metadata=about("Samples per worker and backward pass.", MODEL, minimum=1)
    )
    seed: int = field(
        default=0,
        metadata=about(
            "Decides the initial weights, the order of samples and all noise.", MODEL, minimum=0
        ),
    )
    dropout: float = field(
        default=0.0,
        metadata=about(
            "Share of hidden units that each pass leaves out, others on each worker.",
            MODEL,
            minimum=0,
            below=1,
            metavar="P",
        ),
    )
    augment: bool = field(
        default=False,
        metadata=about("Shift training images by up to two pixels, anew in each epoch.", MODEL),
    )

    optimizer: Literal["sgd", "momentum", "adam", "adamw"] = field(
        default="adam", metadata=about("The rule that updates weights.", OPTIMIZER)
    )
    lr: float = field(
        default=0.001, metadata=about("Learning rate for one worker.", OPTIMIZER, above=0)
    )
    scale_lr: Literal["linear", "sqrt", "none"] = field(
        default="sqrt",
        metadata=about(
            "How the rate grows with the number of workers; not at all with [b]async[/].", OPTIMIZER
        ),
    )
    warmup_epochs: float = field(
        default=0.5,
        metadata=about(
            "Epochs in which it grows from the rate of one worker.", OPTIMIZER, minimum=0
        ),
    )
    accumulate: int = field(
        default=1,
        metadata=about(
            "Backward passes per update; gradients travel at the last.", OPTIMIZER, minimum=1
        ),
    )

    engine: Literal["horovod", "ddp"] = field(
        default="horovod",
        metadata=about(
            "What reduces gradients: Horovod, or PyTorch's DistributedDataParallel ([b]torch[/] "
            "only, under [b]torchrun[/] too).",
            WORKERS,
        ),
    )
    update: Literal["synchronous", "local-sgd", "diloco", "async"] = field(
        default="synchronous",
        metadata=about(
            "When workers agree: average gradients at every step; train alone and then average the "
            "weights, or step with their differences; or share the weights and never wait "
            "(under [b]horovodrun --mpi[/]).",
            WORKERS,
        ),
    )
    staleness: int | None = field(
        default=None,
        metadata=about(
            "How far a worker may be ahead of the slowest ([b]async[/]).",
            WORKERS,
            minimum=0,
            metavar="STEPS",
            shown_default="no bound",
        ),
    )
    period: int = field(
        default=16,
        metadata=about(
            "Steps that each worker takes alone ([b]local-sgd[/], [b]diloco[/]).",
            WORKERS,
            minimum=1,
            metavar="STEPS",
        ),
    )
    update_warmup: int = field(
        default=0,
        metadata=about(
            "Synchronous steps before the first of those.", WORKERS, minimum=0, metavar="STEPS"
        ),
    )
    fragments: int = field(
        default=1,
        metadata=about(
            "Parts of the weights, which meet in turn within a period ([b]local-sgd[/], "
            "[b]diloco[/]).",
            WORKERS,
            minimum=1,
        ),
    )
    outer_lr: float = field(
        default=0.7,
        metadata=about("Learning rate of the outer optimizer ([b]diloco[/]).", WORKERS, above=0),
    )
    outer_momentum: float = field(
        default=0.9,
        metadata=about("Nesterov momentum of the same.", WORKERS, minimum=0, below=1),
    )
    elastic: bool = field(
        default=False,
        metadata=about(
            "Go on while workers are lost and join, under [b]horovodrun --min-np N[/].", WORKERS
        ),
    )
    commit_every: int = field(
        default=10,
        metadata=about(
            "Steps between the points that an elastic run goes back to.", WORKERS, minimum=1
        ),
    )
    straggler_every: int = field(
        default=100,
        metadata=about(
            "Compare where workers' time goes after so many steps, and name the slowest. 0: never.",
            WORKERS,
            minimum=0,
            metavar="STEPS",
        ),
    )
    wait_limit: float | None = field(
        default=None,
        metadata=about(
            "Seconds that workers may wait for one that does not come; all then report and end. "
            "0: for ever.",
            WORKERS,
            minimum=0,
            metavar="SECONDS",
            shown_default="600",
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = field(
        default="auto",
        metadata=about("Where to compute; each worker takes the GPU of its local rank.", WORKERS),
    )
    on_nonfinite: Literal["raise", "skip", "warn"] = field(
        default="raise",
        metadata=about(
            "When a gradient is NaN or infinite on any worker: end the run on all, leave out the "
            "step on all, or say so.",
            WORKERS,
        ),
    )
    on_divergence: Literal["raise", "repair"] = field(
        default="raise",
        metadata=about(
            "When the workers' copies of the model differ: end the run, or make them equal.",
            WORKERS,
        ),
    )
    guard_every: int = field(
        default=100,
        metadata=about("Steps between comparisons of those copies.", WORKERS, minimum=1),
    )
    compression: str = field(
        default="none",
        metadata=about(
            "What gradients become while they travel: [b]none[/], [b]fp16[/], [b]bf16[/], "
            "[b]onebit[/], [b]topk:RATIO[/] or [b]powersgd:RANK,START_STEP[/].",
            WORKERS,
            metavar="NAME[:ARG]",
        ),
    )

    checkpoint_dir: Path | None = field(
        default=None,
        metadata=about(
            "Where each epoch leaves a checkpoint.",
            OUTPUT,
            metavar="DIR",
            shown_default="a new folder below runs/",
        ),
    )
    checkpoint_every: int | None = field(
        default=None,
        metadata=about(
            "Leave one after each so many steps, too.",
            OUTPUT,
            minimum=1,
            metavar="STEPS",
            shown_default="epochs only",
        ),
    )
    resume: bool | None = field(
        default=None,
        metadata=about(
            "Go on from the newest checkpoint of that folder, or of the newest one below runs/.",
            OUTPUT,
            shown_default="yes in a named folder, otherwise no",
        ),
    )
    max_time: float | None = field(
        default=None,
        metadata=about(
            "Save and end before so many minutes are over; also [b]45s[/], [b]2h[/] or [b]1d[/].",
            OUTPUT,
            above=0,
            metavar="MINUTES",
            shown_default="no limit",
        ),
    )
    stop_code: int = field(
        default=0,
        metadata=about(
            "Exit code of a run that a signal or the time limit ended early.",
            OUTPUT,
            minimum=0,
            below=256,
        ),
    )
    log_dir: Path | None = field(
        default=None,
        metadata=about(
            "Where to write TensorBoard events, and events.jsonl with one line per event.",
            OUTPUT,
            metavar="DIR",
            shown_default="none",
        ),
    )

    @property
    def momentum(self) -> float:
        """That of ``--optimizer momentum``; 0 for the others."""
        return 0.9 if self.optimizer == "momentum" else 0.0

    @property
    def rule(self) -> Synchronous | LocalRule | Asynchronous:
        """The update rule. Raises ``ValueError`` where numbers do not fit one another."""
        if self.update == "async":
            return Asynchronous(self.staleness)
        if self.update == "local-sgd":
            return LocalSGD(self.period, self.update_warmup, self.fragments)
        if self.update == "diloco":
            return DiLoCo(
                self.period,
                self.outer_lr,
                self.outer_momentum,
                self.update_warmup,
                self.fragments,
            )
        return Synchronous()

    @property
    def resumes(self) -> bool:
        """Whether a checkpoint that is there is taken up: unless told, in a named folder."""
        return self.checkpoint_dir is not None if self.resume is None else self.resume
