"""Credentials and TLS settings of a client.

Arguments take precedence over environment variables. Secrets are never part of an address and never
shown.
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
"""Environment variable of each field of `Access`."""
CREDENTIALS_VARIABLE = "SIMPLEBUS_CREDENTIALS"
"""Environment variable with the path of a credentials file."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and TLS settings of a client.

    Pass it to `simplebus.connect` as `access=`. The TLS fields apply to addresses that start with
    `simplebuss://`.

    Raises:
        ValueError: If fields contradict each other, for example a password without a user.

    Example:
        access = simplebus.Access(user="ada", password=secret, ca="/etc/simplebus/ca.pem")
        async with simplebus.connect("simplebuss://bus.example.com", access=access) as bus:
            ...
    """

    user: str = ""
    """User name; authenticates together with `password`."""
    password: str = field(default="", repr=False)
    """Password of the user."""
    token: str = field(default="", repr=False)
    """Token that authenticates without a user name."""
    ca: str = ""
    """PEM file of the authorities that sign the server's certificate; empty for the system's.
    """
    cert: str = ""
    """PEM file with the client's certificate, for a server that requires one."""
    key: str = ""
    """PEM file with the key of `cert`, unless `cert` contains the key."""
    context: ssl.SSLContext | None = field(default=None, repr=False)
    """TLS context that is used instead of `ca`, `cert` and `key`."""

    def __post_init__(self) -> None:
        if self.password and not self.user:
            raise ValueError("a password was given without a user, expected both")
        if self.token and self.user:
            raise ValueError("a user and a token were given, expected either")
        if self.key and not self.cert:
            raise ValueError("a key was given without a certificate, expected both")

    @property
    def auth(self) -> Auth | None:
        """Credentials for the Connect request; None without any."""
        if self.token:
            return Auth(token=self.token)
        return Auth(user=self.user, password=self.password) if self.user else None

    def tls(self) -> ssl.SSLContext:
        """Return the TLS context.

        Raises:
            OSError: If a certificate or key file cannot be read. The message names the file.
        """
        if self.context is not None:
            return self.context
        context = _read_pem(self.ca, lambda: ssl.create_default_context(cafile=self.ca or None))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.cert:
            _read_pem(self.cert, lambda: context.load_cert_chain(self.cert, self.key or None))
        return context

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Access:
        """Return the settings from the environment, such as SIMPLEBUS_USER and SIMPLEBUS_PASSWORD.

        Variables replace the values of the file that SIMPLEBUS_CREDENTIALS names.

        Args:
            environment: The variables; by default `os.environ`.

        Raises:
            ValueError: If settings contradict each other or the file is invalid.
            OSError: If the file cannot be read.
        """
        settings: dict[str, Any] = {
            name: environment[variable]
            for name, variable in ENVIRONMENT_VARIABLES.items()
            if environment.get(variable)
        }
        file = environment.get(CREDENTIALS_VARIABLE)
        access = cls.from_file(file) if file else cls()
        if "token" in settings:
            access = replace(access, user="", password="")
        elif "user" in settings:
            access = replace(access, token="")
        return replace(access, **settings)

    @classmethod
    def from_file(cls, path: str | Path) -> Access:
        """Read a TOML file with any of the keys user, password, token, ca, cert and key.

        Paths in the file are relative to its folder.

        Args:
            path: Path of the file. If it holds a password or token, only its owner may have
                access to it.

        Raises:
            ValueError: If the file has another key, or holds a secret that others may read.
            OSError: If the file cannot be read.
        """
        path = Path(path)
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            try:
                settings = toml.loads(file.read().decode("utf-8-sig"))
            except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path} is not valid TOML: {error}") from None
        known_names = [
            dataclass_field.name
            for dataclass_field in fields(cls)
            if dataclass_field.name != "context"
        ]
        for name, value in settings.items():
            if name not in known_names or not isinstance(value, str):
                raise ValueError(
                    f"{path}: unknown or non-text setting {name!r}; "
                    f"expected texts for {', '.join(known_names)}"
                )
        if settings.keys() & {"password", "token"} and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ValueError(f"{path} holds a secret that others may read; chmod 600 it")
        for name in settings.keys() & {"ca", "cert", "key"}:
            settings[name] = str(path.parent / settings[name])
        try:
            return cls(**settings)
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
    """Return the settings for a connection: the arguments, else the environment.

    Raises:
        ValueError: If `access` is given together with another argument, or settings contradict.
        OSError: If a file of the environment cannot be read.
    """
    if access is not None and any(
        argument is not None for argument in (user, password, token, tls)
    ):
        raise ValueError(
            "got access= together with user=, password=, token= or tls=; expected only one of them"
        )
    resolved = access if access is not None else Access.from_environment()
    if user is not None or token is not None:
        resolved = replace(resolved, user=user or "", password=password or "", token=token or "")
    elif password is not None:
        resolved = replace(resolved, password=password)
    return resolved if tls is None else replace(resolved, context=tls)


def start_tls(sock: socket.socket, address: Address, access: Access | None) -> TlsSocket:
    """Wrap a connected socket in TLS, before its handshake. Raises OSError."""
    return TlsSocket(sock, (access or Access()).tls(), server_name=address.host)


def continue_handshake(tls: TlsSocket) -> bool:
    """Continue the TLS handshake. Return True when it is complete. Raises OSError."""
    try:
        tls.handshake()
    except BlockingIOError:
        return False
    return True


def _read_pem(path: str, read: Callable[[], T]) -> T:
    """Call `read`; convert its errors to an OSError that names the file."""
    try:
        return read()
    except ssl.SSLError as error:
        raise OSError(f"{path} has no valid PEM certificate or key: {error.reason}") from None
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from None
