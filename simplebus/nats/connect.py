"""INFO and CONNECT: what both sides say of themselves, in JSON (NATS protocol).

Rule 1: this file knows what is well formed; what follows from it is the session's business.
"""

from __future__ import annotations

import msgspec

from simplebus.core.errors import Reason
from simplebus.nats.errors import NatsError

PROTOCOL_VERSION = "2.15.1"
"""The reference server's whose behaviour is followed: clients judge by it what they may use."""


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


class Options(msgspec.Struct, frozen=True):
    """What a client says of itself. What it leaves out is as here."""

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


_decoder = msgspec.json.Decoder(Options)


def options(text: bytes) -> Options:
    """What CONNECT says. Raises NatsError for what is no such object."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        shown = text[:60].decode("utf-8", "backslashreplace")
        raise NatsError(
            Reason.BAD_CONNECT, f"a CONNECT said {shown!r}: {error}", closed="Parse Error"
        ) from None
