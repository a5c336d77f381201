"""How a client comes in: whom it trusts over TLS, and who it says it is.

Rule 1: what a program says goes before its environment; a secret is never part of an address, and
never shown.
Rule 2: nothing here waits, and no connection is made.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from simplebus.client.addresses import Address
from simplebus.core import toml
from simplebus.core.protocol.requests import Auth
from simplebus.net.tls import TlsSocket

ENVIRONMENT_VARIABLES = {
    "user": "SIMPLEBUS_USER",
    "password": "SIMPLEBUS_PASSWORD",
    "token": "SIMPLEBUS_TOKEN",
    "ca": "SIMPLEBUS_TLS_CA",
    "cert": "SIMPLEBUS_TLS_CERT",
    "key": "SIMPLEBUS_TLS_KEY",
}
"""Where the environment says what, beside SIMPLEBUS_CREDENTIALS, which names a file."""
CREDENTIALS_VARIABLE = "SIMPLEBUS_CREDENTIALS"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """What a client shows, and whom it trusts. Raises ValueError for what contradicts itself.

    Give it to `simplebus.connect` as `access=`. It is used for every address; the part about TLS
    for those that begin with `simplebuss://`.
    """

    user: str = ""
    """Who it is, with `password`."""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    """Or this alone."""
    ca: str = ""
    """A file of authorities, as PEM, that may have signed the bus's certificate; empty for those
    that the system trusts."""
    cert: str = ""
    """A file with this program's own certificate, as PEM, for a bus that asks for one."""
    key: str = ""
    """Its key, where it does not stand in the same file."""
    context: ssl.SSLContext | None = field(default=None, repr=False)
    """What decides instead of these three."""

    def __post_init__(self) -> None:
        if self.password and not self.user:
            raise ValueError("a password was given without a user, expected both")
        if self.token and self.user:
            raise ValueError("a user and a token were given, expected either")
        if self.key and not self.cert:
            raise ValueError("a key was given without a certificate, expected both")

    @property
    def auth(self) -> Auth | None:
        """What the Connect says; None for nothing."""
        if self.token:
            return Auth(token=self.token)
        return Auth(user=self.user, password=self.password) if self.user else None

    def tls(self) -> ssl.SSLContext:
        """What decides whom to trust. Raises OSError, naming the file that is no good."""
        if self.context is not None:
            return self.context
        made = _read(self.ca, lambda: ssl.create_default_context(cafile=self.ca or None))
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert:
            _read(self.cert, lambda: made.load_cert_chain(self.cert, self.key or None))
        return made

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Access:
        """What the environment says. Raises ValueError, and OSError for a file that is no good."""
        said: dict[str, Any] = {
            name: environment[variable]
            for name, variable in ENVIRONMENT_VARIABLES.items()
            if environment.get(variable)
        }
        file = environment.get(CREDENTIALS_VARIABLE)
        found = cls.from_file(file) if file else cls()
        if "token" in said:
            found = replace(found, user="", password="")
        elif "user" in said:
            found = replace(found, token="")
        return replace(found, **said)

    @classmethod
    def from_file(cls, path: str | Path) -> Access:
        """Read a TOML file with any of user, password, token, ca, cert and key; files in it are
        relative to its folder. Raises ValueError, naming it, for another key, and where it holds a
        secret that others may read; OSError when it cannot be read."""
        path = Path(path)
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            try:
                said = toml.loads(file.read().decode("utf-8-sig"))
            except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is no TOML: {error}") from None
        known = [each.name for each in fields(cls) if each.name != "context"]
        for name, value in said.items():
            if name not in known or not isinstance(value, str):
                raise ValueError(
                    f"{path}: {name!r} is no text that stands there, expected {', '.join(known)}"
                )
        if said.keys() & {"password", "token"} and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"{path} holds a secret that others may read; chmod 600 it")
        for name in said.keys() & {"ca", "cert", "key"}:
            said[name] = str(path.parent / said[name])
        try:
            return cls(**said)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def resolve_access(
    access: Access | None,
    *,
    user: str | None = None,
    password: str | None = None,
    token: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> Access:
    """What `connect` goes by: what it is told, else the environment. Raises as `Access` does."""
    if access is not None and any(each is not None for each in (user, password, token, tls)):
        raise ValueError("access was given beside user, password, token or tls, expected either")
    found = access if access is not None else Access.from_environment()
    if user is not None or token is not None:
        found = replace(found, user=user or "", password=password or "", token=token or "")
    elif password is not None:
        found = replace(found, password=password)
    return found if tls is None else replace(found, context=tls)


def start_tls(sock: socket.socket, where: Address, access: Access | None) -> TlsSocket:
    """TLS on a connected socket, before its handshake. Raises OSError."""
    return TlsSocket(sock, (access or Access()).tls(), server_name=where.host)


def continue_handshake(tls: TlsSocket) -> bool:
    """Go on with the handshake; whether it is made. Raises OSError."""
    try:
        tls.handshake()
    except BlockingIOError:
        return False
    return True


def _read(path: str, read: Callable[[], T]) -> T:
    """Raises OSError, naming the file that is no good."""
    try:
        return read()
    except ssl.SSLError as error:
        raise OSError(f"{path} holds no certificate or key as PEM: {error.reason}") from None
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None
