"""The first process of a host: settings in as JSON, a host that answers ssh out.

It says "ready" on its standard output, and ends, with all processes of the host, when its
standard input is closed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any


def run(settings: dict[str, Any]) -> None:
    """Furnish the namespaces that this process was started in, and wait."""
    for source, target in settings["mounts"]:
        subprocess.run(["mount", "--bind", source, target], check=True)
    socket.sethostname(settings["name"])
    threading.Thread(target=_end_with_input, daemon=True).start()
    server = [sys.executable, "-m", "hvdsync.tools.hosts.ssh_server"]
    environ = {**os.environ, "TMPDIR": settings["tmp"]}
    ssh = subprocess.Popen(server, stdin=subprocess.DEVNULL, env=environ)
    # Processes whose parent has ended become children of the first one, which must hear them end.
    with suppress(ChildProcessError):
        while os.wait()[0] != ssh.pid:
            pass
    raise SystemExit(f"host {settings['name']}: its ssh server has ended")


def _end_with_input() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
