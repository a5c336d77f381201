"""INFO and CONNECT: what both sides say of themselves, in JSON (NATS protocol).

Rule 1: this file knows what is well formed; what follows from it is the front's business.
Rule 2: CONNECT is read as the reference server reads it: names in any case, null and unknown names
say nothing, what is not said stays as it was, and a value of another type is an error.
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
"""The reference server's whose behaviour is followed: clients judge by it what they may use."""
_LINE_BYTES_MAX = 4096
SUPPORTED_PROTOCOLS = (0, 1)
"""What a client may say that it speaks: from 1 on it understands INFO at any time."""


class Info(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server says of itself. Fields that are left out mean no."""

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
    ldm: bool = False
    connect_info: bool = False

    def line(self) -> bytes:
        """As it is sent."""
        return b"INFO " + msgspec.json.encode(self) + b"\r\n"


def make_info(settings: NatsSettings, **about: Any) -> Info:
    """What the server says to one client. `about` are the fields that are not the door's."""
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
        **about,
    )


class ConnectOptions(msgspec.Struct, frozen=True):
    """What a client says of itself. What it never said is as here."""

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
        """What it says of who it is, but for a signature."""
        return Auth(user=self.user, password=self.password, token=self.auth_token)

    @property
    def has_no_credentials(self) -> bool:
        """Whether it says nothing of who it is."""
        return not (self.user or self.password or self.auth_token or self.nkey or self.jwt)


DEFAULT_OPTIONS = ConnectOptions()
_FIELDS = {
    field.encode_name: (field.name, field.type) for field in msgspec.structs.fields(ConnectOptions)
}
# The only other letter that is one of these fields' in lower case, for the reference server.
_LONG_S = "\u017f"
_NUMBER_MAX = (1 << 63) - 1


def parse_connect(text: bytes, before: ConnectOptions = DEFAULT_OPTIONS) -> ConnectOptions:
    """What is known of a client that says this, and said what was known `before`.

    Raises NatsError when it is no JSON object, or a value is of another type than expected.
    """
    changes: dict[str, object] = {}
    try:
        for name, value in _decode_object(text):
            field, expected = _FIELDS.get(name.lower().replace(_LONG_S, "s"), ("", None))
            if value is None or not field:
                continue
            # A truth value is a number for Python, and for nobody else.
            if type(value) is not expected or (type(value) is int and abs(value) > _NUMBER_MAX):
                kind = type(value).__name__
                raise ValueError(f"{name} is of the type {kind}, expected {expected.__name__}")
            changes[field] = value
    except (ValueError, RecursionError) as error:
        # What it said is not shown: there may be a password in it.
        raise NatsError(
            Reason.BAD_CONNECT, f"a CONNECT is no good: {error}", closed_reason="Parse Error"
        ) from None
    return msgspec.structs.replace(before, **changes) if changes else before


def _decode_object(text: bytes) -> list[tuple[str, object]]:
    """Names and values in the order in which they come; none for null. Raises ValueError."""
    # The standard library's decoder takes halves of characters as the reference server does.
    pairs = json.loads(
        text.decode("utf-8", "replace"), object_pairs_hook=_Pairs, parse_constant=_reject_constant
    )
    if pairs is None:
        return []
    if not isinstance(pairs, _Pairs):
        raise ValueError("expected an object")
    return pairs


class _Pairs(list[tuple[str, object]]):
    """An object, which is told from a list by this."""


def _reject_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def parse_greeting(heard: bytes | bytearray, searched: int = 0) -> tuple[bool, Auth | None]:
    """Whether a client's first line is whole, or too long to be waited for, and what it says of who
    the client is. It does not end before `searched`. What is wrong with it is for the front to
    say."""
    end = heard.find(b"\n", searched)
    if end < 0:
        return len(heard) > _LINE_BYTES_MAX, None
    verb, _, said = bytes(heard[:end]).strip().partition(b" ")
    if verb.lower() != b"connect":
        return True, None
    try:
        found = parse_connect(said)
    except NatsError:
        return True, None
    return True, found.auth
