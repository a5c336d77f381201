"""Authentication of HTTP requests: Basic, Bearer, client certificates and addresses.

Users are those of the other listeners. A user needs the permission to monitor, unless it has all
permissions. Health checks need no user.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import socket
from collections.abc import Iterable, Sequence

from simplebus.core.errors import Reason, RemoteProtocolError
from simplebus.core.protocol.requests import Auth
from simplebus.core.users.permissions import AdminRight
from simplebus.core.users.users import User
from simplebus.monitor.requests import PUBLIC_PATHS, Request, Response, error_response
from simplebus.server.server import Server


class AllowedHosts:
    """Host names that requests without credentials may use. Protects against DNS rebinding."""

    def __init__(self, extra_hosts: Iterable[str] = ()) -> None:
        """`extra_hosts` are allowed besides the name of this machine."""
        self._allowed = {each.lower().rstrip(".") for each in (*extra_hosts, socket.gethostname())}

    def refusal(self, host: bytes) -> Response | None:
        """Return an error response for a request with this Host header, or None if it is allowed.

        IP addresses, localhost and requests without the header are always allowed.
        """
        host_name = _without_port(host.decode("latin-1")).lower().rstrip(".")
        if not host or host_name == "localhost" or host_name.endswith(".localhost"):
            return None
        if host_name in self._allowed or _is_ip_address(host_name):
            return None
        return error_response(
            421,
            f"unknown host {host_name[:80]!r}: without authentication, expected an IP address, "
            "localhost or a name given with --http-name",
        )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_ip_address(text: str) -> bool:
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
_RETRY_AFTER = (("Retry-After", "2"),)


class HttpAuth:
    """Checks requests against the current users of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __call__(
        self, request: Request, peer: str, authorization: str, certificate_names: Sequence[str]
    ) -> Response | None:
        """Return an error response, or None if the request is allowed.

        Args:
            request: The request.
            peer: HOST:PORT of the client.
            authorization: The Authorization header, or an empty text.
            certificate_names: Names in the client certificate.
        """
        users = self._server.broker.users
        if users is None or request.path in PUBLIC_PATHS:
            return None
        user = await self.find_user(peer, authorization, certificate_names)
        if user is None or isinstance(user, Response):
            return user
        grants = users.get_grants(user)
        if grants is None or grants.has_right(AdminRight.MONITOR):
            return None
        return error_response(403, f"user {user.name!r} has no permission to monitor")

    async def find_user(
        self,
        peer: str,
        authorization: str,
        certificate_names: Sequence[str],
        *,
        accepts_address: bool = True,
    ) -> User | Response | None:
        """Return the user of a request, an error response, or None on a server without users.

        Args:
            peer: HOST:PORT of the client.
            authorization: The Authorization header, or an empty text.
            certificate_names: Names in the client certificate.
            accepts_address: False if the user must have sent credentials or a certificate.
        """
        users, auth_worker = self._server.broker.users, self._server.auth_worker
        if users is None:
            return None
        address = peer.rpartition(":")[0].strip("[]")
        try:
            auth = parse_authorization(authorization)
            if auth_worker is not None:
                await auth_worker.check(auth, address)
            user = users.authenticate(
                auth,
                certified=certificate_names,
                address=address if accepts_address else "",
                version=2,
            )
        except RemoteProtocolError as error:
            if error.reason is Reason.TOO_MANY_ATTEMPTS:
                return _auth_error(429, error.sentence, _RETRY_AFTER)
            return _auth_error(401, error.sentence, _CHALLENGE)
        has_credentials = auth is not None and bool(auth.user or auth.token)
        if not accepts_address and not has_credentials and user is users.anonymous_user:
            return _auth_error(401, "expected credentials, got an anonymous request", _CHALLENGE)
        return user

    def requires_valid_credentials(self, authorization: str) -> bool:
        """Return True if a request with this header is allowed only with valid credentials.

        An address alone does not count: any web page in a browser at that address has it, too.
        """
        if self._server.broker.users is None:
            return False
        try:
            auth = parse_authorization(authorization)
        except RemoteProtocolError:
            return True
        return auth is not None and bool(auth.user or auth.token)


def parse_authorization(authorization: str) -> Auth | None:
    """Return the credentials of an Authorization header; None if it is empty.

    Raises:
        RemoteProtocolError: The header is invalid (unauthorized).
    """
    if not authorization:
        return None
    scheme, _, credentials_text = authorization.partition(" ")
    credentials_text = credentials_text.strip()
    if len(credentials_text) <= _SECRET_CHARACTERS_MAX:
        if scheme.lower() == "bearer" and credentials_text:
            return Auth(token=credentials_text)
        if scheme.lower() == "basic":
            try:
                user, colon, password = (
                    base64.b64decode(credentials_text, validate=True).decode().partition(":")
                )
            except (binascii.Error, UnicodeDecodeError):
                colon = ""
            if colon:
                return Auth(user=user, password=password)
    raise RemoteProtocolError(
        Reason.UNAUTHORIZED, "expected an Authorization header of type Basic (in UTF-8) or Bearer"
    )


def _auth_error(status: int, message: str, headers: tuple[tuple[str, str], ...]) -> Response:
    body = error_response(status, message)
    return Response(body.body, body.content_type, status, headers)
