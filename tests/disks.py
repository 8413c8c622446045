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
    if _mount(folder, f"size={megabytes}m"):
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
def removable(folder):
    """``folder`` on a disk that :func:`read_only` can turn; a plain folder where that is enough."""
    folder.mkdir(exist_ok=True)
    mounted = _mount(folder, "size=64m")
    if not mounted and os.geteuid() == 0:
        pytest.skip("root may write everywhere here, and mount nothing")
    try:
        yield
    finally:
        if mounted:
            _unmount(folder)


@contextmanager
def read_only(folder):
    """Nothing can be written to a ``removable`` folder inside."""
    mounted = os.path.ismount(folder)
    if mounted:
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    else:
        folder.chmod(0o555)
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        else:
            folder.chmod(0o755)


def _mount(folder, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _unmount(folder):
    subprocess.run(["umount", "--lazy", folder], check=True)
