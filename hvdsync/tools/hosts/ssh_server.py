"""The ssh server of a host: keys in the user's home in, commands run for whoever has them out.

Needs no program of the system, so that hosts can be made wherever pip works.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import tempfile
from pathlib import Path
from typing import Any

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


async def serve() -> None:
    """Answer on port 22 until this process ends; the key of the user is that of the host too."""
    import asyncssh

    home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    await asyncssh.listen(
        "",
        22,
        server_host_keys=[str(home / ".ssh" / "id_ed25519")],
        authorized_client_keys=str(home / ".ssh" / "authorized_keys"),
        process_factory=_run,
        encoding=None,
    )
    os.write(1, b"ready\n")
    await asyncio.Event().wait()


def _environment(user: pwd.struct_passwd) -> dict[str, str]:
    """As sshd has it: nothing of that of the server, but for what stands in for the host's /tmp."""
    return {
        "HOME": user.pw_dir,
        "USER": user.pw_name,
        "PATH": _PATH,
        "TMPDIR": tempfile.gettempdir(),
    }


async def _run(process: Any) -> None:
    user = pwd.getpwuid(os.geteuid())
    shell = user.pw_shell or "/bin/sh"
    pipe = asyncio.subprocess.PIPE
    command = ("-c", process.command) if process.command else ()
    child = await asyncio.create_subprocess_exec(
        shell,
        *command,
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        cwd=user.pw_dir,
        env={**_environment(user), "SHELL": shell},
    )
    await process.redirect(stdin=child.stdin, stdout=child.stdout, stderr=child.stderr)
    await process.stdout.drain()
    await process.stderr.drain()
    code = await child.wait()
    if code < 0:
        process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
    else:
        process.exit(code)


if __name__ == "__main__":
    asyncio.run(serve())
