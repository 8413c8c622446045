"""Disks that refuse: too small, or read-only. A folder goes in; for a while writing there fails."""

import os
import resource
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small(folder, megabytes):
    """``folder`` on a disk of so many MB; where no disk may be mounted, no file may be larger."""
    folder.mkdir(exist_ok=True)
    if _mount(folder, f"size={megabytes}m", kind=("-t", "tmpfs")):
        try:
            yield
        finally:
            _unmount(folder)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def read_only(folder):
    """Nothing can be written to ``folder``, nor made in it, inside."""
    # Over itself: a job that holds a file open for writing would keep its disk from turning.
    mounted = _mount(folder, "bind", folder) and _mount(folder, "remount,bind,ro")
    if not mounted and os.geteuid() == 0:
        pytest.skip("root may write everywhere here, and mount nothing")
    if not mounted:
        folder.chmod(0o555)
    try:
        yield
    finally:
        if mounted:
            _unmount(folder)
        else:
            folder.chmod(0o755)


def _mount(folder, options, source="none", kind=()):
    command = ["mount", *kind, "-o", options, source, folder]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(folder):
    subprocess.run(["umount", "--lazy", folder], check=True)
