"""Who may see the figures of a bus that has users: HTTP Basic and Bearer, certificates, addresses.

Rule 1: users are those of all doors, and are judged as there; who is let in needs the right to
monitor as well, unless it may do everything.
Rule 2: health is everybody's: who asks for it may have no name.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import socket
from collections.abc import Iterable, Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.permissions import Right
from simplebus.monitor.requests import OPEN_PATHS, Request, Response, problem
from simplebus.server.server import Engine


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


_SECRET_CHARACTERS_MAX = 4096
_CHALLENGE = (
    ("WWW-Authenticate", 'Basic realm="simplebus", charset="UTF-8"'),
    ("WWW-Authenticate", 'Bearer realm="simplebus"'),
)
_LATER = (("Retry-After", "2"),)


class HttpGate:
    """Of one engine, whose users may change."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(
        self, request: Request, peer: str, authorization: str, certified: Sequence[str]
    ) -> Response | None:
        """Why a question is not answered; None when it is. `certified` are the names of the
        certificate that the peer has shown."""
        users, gatekeeper = self._engine.broker.users, self._engine.gatekeeper
        if users is None or request.path in OPEN_PATHS:
            return None
        address = peer.rpartition(":")[0].strip("[]")
        try:
            auth = credentials(authorization)
            if gatekeeper is not None:
                await gatekeeper.hear(auth, address)
            user = users.admit(auth, certified=certified, address=address, version=2)
        except RemoteProtocolError as error:
            if error.reason is Reason.TOO_MANY_ATTEMPTS:
                return _refused(429, error.sentence, _LATER)
            return _refused(401, error.sentence, _CHALLENGE)
        grants = users.grants(user)
        if grants is None or grants.has(Right.MONITOR):
            return None
        return problem(403, f"user {user.name!r} has no right to monitor")

    def decides_by(self, authorization: str) -> bool:
        """Whether nobody is answered who says this and is not who it says: an address alone is
        that of any page in a browser there."""
        if self._engine.broker.users is None:
            return False
        try:
            auth = credentials(authorization)
        except RemoteProtocolError:
            return True
        return auth is not None and bool(auth.verify_password or auth.token)


def credentials(authorization: str) -> Auth | None:
    """What an Authorization header says; None for nothing.

    Raises RemoteProtocolError (unauthorized) for one that makes no sense.
    """
    if not authorization:
        return None
    kind, _, said = authorization.partition(" ")
    said = said.strip()
    if len(said) <= _SECRET_CHARACTERS_MAX:
        if kind.lower() == "bearer" and said:
            return Auth(token=said)
        if kind.lower() == "basic":
            try:
                user, colon, password = (
                    base64.b64decode(said, validate=True).decode().partition(":")
                )
            except (binascii.Error, UnicodeDecodeError):
                colon = ""
            if colon:
                return Auth(user=user, password=password)
    raise RemoteProtocolError(
        Reason.UNAUTHORIZED, "expected an Authorization of Basic, in UTF-8, or of Bearer"
    )


def _refused(status: int, sentence: str, headers: tuple[tuple[str, str], ...]) -> Response:
    said = problem(status, sentence)
    return Response(said.body, said.content_type, status, headers)
