"""What Horovod is installed here, and what it was built for.

In: this environment's site-packages. Out: :class:`Installed`, without importing Horovod.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hvdsync.tools.horovod_build.patches import RECORD
from hvdsync.tools.horovod_build.wheels import extension_files, read_metadata


@dataclass(frozen=True)
class Installed:
    """An installed Horovod: its version, and per framework what is known of its extension."""

    version: str
    folder: Path
    #: framework -> version of the framework that the extension was compiled against
    built_for: dict[str, str] = field(default_factory=dict)
    #: framework -> what hvdsync recorded when it built the extension; absent for other builds
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def key(self, framework: str) -> str | None:
        """The cache key of the extension installed for this framework, when hvdsync built it."""
        entry = self.records.get(framework)
        return entry.get("key") if entry else None


def find_installed() -> Installed | None:
    """The Horovod of this environment, or None."""
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        return None
    spec = util.find_spec("horovod")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent.parent
    else:
        folder = Path(sysconfig.get_path("platlib"))
    content = read_metadata(folder)
    built_for, records = {}, {}
    recorded = content.get(RECORD, {}).get("extensions", {})
    for framework, name in (("torch", "pytorch"), ("tensorflow", "tensorflow")):
        if not extension_files(folder, framework):
            continue
        built_for[framework] = str(content.get(name, "unknown"))
        if framework in recorded:
            records[framework] = recorded[framework]
    return Installed(version, folder, built_for, records)
