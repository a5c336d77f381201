"""What the HTTP door may be called: a stranger's page may not read it through a browser on this
machine, by having a name of its own lead to 127.0.0.1 (DNS rebinding).

Rule 1: who comes over loopback, in clear, and does not say who it is calls the door by an address,
by localhost, or by a name that this machine has or was told. No stranger has those. What is said
where nobody is asked shows nothing: a page may say it.
Rule 2: other ways in are guarded otherwise: by TLS, whose certificate names the server, by secrets,
which a browser sends to nobody else, and by the network.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from simplebus.monitor.requests import Response, problem


class Names:
    """Those of one door."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        """`more` are names that it was told."""
        self._known = {each.lower().rstrip(".") for each in (*more, socket.gethostname())}

    def refusal(self, host: bytes) -> Response | None:
        """Why somebody who comes as said above is not answered; None when it is. `host` is what
        the request calls the door, without any where it says nothing."""
        called = _without_port(host.decode("latin-1")).lower().rstrip(".")
        if not host or called == "localhost" or called.endswith(".localhost"):
            return None
        if called in self._known or _is_address(called):
            return None
        return problem(
            421,
            f"this port is not called {called[:80]!r}: where it asks nobody who it is, it answers "
            "to addresses, to localhost and to what --http-name says",
        )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
