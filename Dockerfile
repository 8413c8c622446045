# An image with hvdsync, PyTorch and Horovod over Gloo and MPI, for Docker, Kubernetes and Slurm.
#
#   docker build -t hvdsync .
#   docker build -t hvdsync:cuda . --build-arg GPU=nccl \
#       --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 \
#       --build-arg RUNTIME=nvidia/cuda:13.0.1-runtime-ubuntu24.04
#
# EXTRAS=torch,tensorflow,keras     other frameworks than PyTorch
# PIP_EXTRA_INDEX_URL=...           where the small CPU builds of PyTorch are; else it brings CUDA's
#
# Run as it is it trains on MNIST with two workers:  docker run --rm --shm-size=1g hvdsync
ARG BASE=debian:bookworm-slim
ARG RUNTIME=${BASE}

FROM ${BASE} AS build
ARG EXTRAS=torch
ARG GPU=none
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_NO_CACHE_DIR=1 HVDSYNC_MPI=pypi
# Compilers of the distribution, whichever it has at the time: nothing of them is in the image.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hvdsync
ENV PATH=/opt/hvdsync/bin:${PATH}
WORKDIR /src
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY hvdsync hvdsync
# As setup.cfg pins them.
# hadolint ignore=DL3013
RUN pip install ".[${EXTRAS},mpi,build]"
# The GPU need not be here: its kernels are compiled for those that the framework knows.
WORKDIR /
RUN python -m hvdsync build-horovod --gpu "${GPU}" && rm -rf /root/.cache

FROM ${RUNTIME}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        libgomp1 openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 mpiuser
COPY --from=build /opt/hvdsync /opt/hvdsync
ENV PATH=/opt/hvdsync/bin:${PATH} PYTHONUNBUFFERED=1
# Launchers reach other hosts by ssh as this user, on a port that needs no root, with keys that the
# cluster mounts; hosts are new in every job, so that their keys cannot be known.
RUN printf '%s\n' 'Port 2222' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' \
        'LogLevel ERROR' > /etc/ssh/ssh_config.d/hvdsync.conf \
    && printf '%s\n' 'Port 2222' 'PidFile /home/mpiuser/sshd.pid' \
        'HostKey /home/mpiuser/.ssh/id_rsa' 'StrictModes no' \
        "SetEnv PATH=${PATH}" > /home/mpiuser/.sshd_config \
    && chown mpiuser: /home/mpiuser/.sshd_config
# mpiuser
USER 1000
WORKDIR /home/mpiuser
CMD ["horovodrun", "--gloo", "-np", "2", "python", "-m", "hvdsync.train"]
