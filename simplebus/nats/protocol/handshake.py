"""INFO and CONNECT of the NATS protocol.

CONNECT is parsed like nats-server does: names in any case, null and unknown names are ignored,
missing fields keep their value, and a value of a wrong type is an error.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from simplebus.core.errors import Reason
from simplebus.core.protocol.requests import Auth
from simplebus.nats.errors import NatsError
from simplebus.nats.settings import NatsSettings

PROTOCOL_VERSION = "2.15.1"
"""Version of nats-server that this server behaves like: clients derive available features from it.
"""
_LINE_BYTES_MAX = 4096
SUPPORTED_PROTOCOLS = (0, 1)
"""Accepted values of `protocol` in CONNECT. A client with 1 accepts INFO at any time."""


class Info(msgspec.Struct, frozen=True, omit_defaults=True):
    """INFO of the server. Omitted fields mean false."""

    server_id: str
    server_name: str
    version: str
    proto: int
    go: str
    host: str
    port: int
    headers: bool
    max_payload: int
    client_id: int
    client_ip: str
    auth_required: bool = False
    tls_required: bool = False
    tls_available: bool = False
    tls_verify: bool = False
    nonce: str = ""
    connect_urls: tuple[str, ...] = ()
    ldm: bool = False
    connect_info: bool = False

    def line(self) -> bytes:
        """Return the encoded INFO line."""
        return b"INFO " + msgspec.json.encode(self) + b"\r\n"


def make_info(settings: NatsSettings, **about: Any) -> Info:
    """Return the INFO for one client. `about` are the fields that differ between clients."""
    return Info(
        server_name=settings.server_name,
        version=PROTOCOL_VERSION,
        proto=1,
        go="none",
        headers=True,
        max_payload=settings.limits.max_payload,
        tls_required=settings.tls_required,
        tls_available=settings.tls_available,
        tls_verify=settings.tls_verify,
        connect_urls=settings.connect_urls,
        **about,
    )


class ConnectOptions(msgspec.Struct, frozen=True):
    """Options of CONNECT, with the defaults of nats-server."""

    verbose: bool = True
    pedantic: bool = True
    echo: bool = True
    protocol: int = 0
    name: str = ""
    lang: str = ""
    version: str = ""
    headers: bool = False
    no_responders: bool = False
    tls_required: bool = False
    user: str = ""
    password: str = msgspec.field(default="", name="pass")
    auth_token: str = ""
    nkey: str = ""
    sig: str = ""
    jwt: str = ""
    account: str = ""
    new_account: bool = False

    @property
    def auth(self) -> Auth:
        """Credentials without the signature."""
        return Auth(user=self.user, password=self.password, token=self.auth_token)

    @property
    def has_no_credentials(self) -> bool:
        """True if CONNECT contains no credentials."""
        return not (self.user or self.password or self.auth_token or self.nkey or self.jwt)


DEFAULT_OPTIONS = ConnectOptions()
_FIELDS = {
    field.encode_name: (field.name, field.type) for field in msgspec.structs.fields(ConnectOptions)
}
# Go's case folding, which nats-server uses, also maps the long s to `s`.
_LONG_S = "\u017f"
_NUMBER_MAX = (1 << 63) - 1


def parse_connect(text: bytes, before: ConnectOptions = DEFAULT_OPTIONS) -> ConnectOptions:
    """Parse the JSON of CONNECT.

    Args:
        text: JSON object or null.
        before: Options of an earlier CONNECT; fields that are missing now keep these values.

    Raises:
        NatsError: The text is not a JSON object, or a value has a wrong type.
    """
    changes: dict[str, object] = {}
    try:
        for name, value in _decode_object(text):
            field, expected = _FIELDS.get(name.lower().replace(_LONG_S, "s"), ("", None))
            if value is None or not field:
                continue
            # Compared by exact type: in Python a bool is an int.
            if type(value) is not expected or (type(value) is int and abs(value) > _NUMBER_MAX):
                kind = type(value).__name__
                raise ValueError(f"{name} is of the type {kind}, expected {expected.__name__}")
            changes[field] = value
    except (ValueError, RecursionError) as error:
        # The text is not shown: it may contain a password.
        raise NatsError(
            Reason.BAD_CONNECT, f"CONNECT is invalid: {error}", closed_reason="Parse Error"
        ) from None
    return msgspec.structs.replace(before, **changes) if changes else before


def _decode_object(text: bytes) -> list[tuple[str, object]]:
    """Return the fields of a JSON object in order; empty for null. Raises ValueError."""
    # The standard library accepts lone surrogates, like nats-server.
    pairs = json.loads(
        text.decode("utf-8", "replace"), object_pairs_hook=_Pairs, parse_constant=_reject_constant
    )
    if pairs is None:
        return []
    if not isinstance(pairs, _Pairs):
        raise ValueError("expected an object")
    return pairs


class _Pairs(list[tuple[str, object]]):
    """JSON object, distinguishable from a JSON array."""


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not valid JSON")


def parse_greeting(data: bytes | bytearray, searched: int = 0) -> tuple[bool, Auth | None]:
    """Return True if the first line is complete or too long to wait for, and its credentials.

    The line does not end before offset `searched`. Errors in the line are reported later by the
    server.
    """
    end = data.find(b"\n", searched)
    if end < 0:
        return len(data) > _LINE_BYTES_MAX, None
    verb, _, options_json = bytes(data[:end]).strip().partition(b" ")
    if verb.lower() != b"connect":
        return True, None
    try:
        options = parse_connect(options_json)
    except NatsError:
        return True, None
    return True, options.auth
