"""The key-value store of ``horovodrun`` over Gloo: rank 0's words go in, every rank gets them out.

Its address is in the environment that the launcher gives to each rank.
"""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 20.0


def pass_on(
    environ: Mapping[str, str], rank: int, key: str, payload: bytes, *, seconds: float
) -> bytes | None:
    """The ``payload`` of rank 0, on every rank; what the others give is not looked at.

    ``key`` is new each time, in the form "scope/name". None where there is no such store, or where
    rank 0 says nothing within ``seconds``.
    """
    address = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if address is None or port is None:
        return None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        # Not through urllib, which may take a proxy's address from the environment.
        connection = http.client.HTTPConnection(address, int(port), timeout=_ANSWER_SECONDS)
        try:
            if rank == 0:
                connection.request("PUT", f"/{key}", payload)
            else:
                connection.request("GET", f"/{key}")
            response = connection.getresponse()
            body = response.read() if response.status == 200 else b""
        except (OSError, http.client.HTTPException) as error:
            logger.debug("rank %d: the launcher's store does not answer: %s", rank, error)
            return None
        finally:
            connection.close()
        if rank == 0:
            return payload
        if body:
            return body
        time.sleep(0.05)
    return None
