"""NATS subject syntax.

On the wire a subject is bytes; inside it is the same bytes decoded as Latin-1, so nothing is lost.
NATS has two wildcards, `*` and a final `>`. A token `#` is literal and therefore escaped for the
subscription index, where `#` is the wildcard of channels.
"""

from __future__ import annotations

from simplebus.core.errors import RemoteProtocolError
from simplebus.core.limits import PATTERN_SEGMENTS_MAX
from simplebus.core.protocol.envelope import decode_channel

WILDCARD_ONE, WILDCARD_REST = b"*", b">"
ACK_PREFIX = b"$JS.ACK."
"""Beginning of the subjects that acks are published on."""
_RESERVED = (b"_R_.", b"_GR_.", ACK_PREFIX)
_ESCAPE = "\x00"
_ESCAPES = {"\\": r"\\", '"': r"\""} | dict(
    zip("\a\b\f\n\r\t\v", map("\\{}".format, "abfnrtv"), strict=True)
)


def is_legal(subject: bytes) -> bool:
    """Return True if a client may subscribe to the subject: no empty token, `>` only at the end."""
    tokens = subject.split(b".")
    return b"" not in tokens and WILDCARD_REST not in tokens[:-1]


def is_literal(subject: bytes) -> bool:
    """Return True if a client may publish on the subject: legal and without wildcards."""
    tokens = subject.split(b".")
    return not (b"" in tokens or WILDCARD_ONE in tokens or WILDCARD_REST in tokens)


def has_wildcard(subject: bytes) -> bool:
    """Return True if a token is a wildcard."""
    tokens = subject.split(b".")
    return WILDCARD_ONE in tokens or WILDCARD_REST in tokens


def is_too_deep(subject: bytes) -> bool:
    """Return True if a subject with wildcards has more tokens than a pattern may have segments."""
    tokens = subject.split(b".")
    return len(tokens) > PATTERN_SEGMENTS_MAX and has_wildcard(subject)


def is_reserved_reply(reply: bytes) -> bool:
    """Return True if clients must not use the reply subject.

    Servers reply to each other there, and a reply to an ack subject would acknowledge a message.
    """
    return reply.startswith(_RESERVED)


def to_text(subject: bytes) -> str:
    """Return the internal text of a subject."""
    return subject.decode("latin-1")


def quote(subject: bytes) -> str:
    """Return the subject as in error lines of nats-server: quoted like Go, in UTF-8."""
    shown = "".join(map(_quote_character, subject.decode(errors="surrogateescape")))
    return f'"{shown}"'.encode().decode("latin-1")


def _quote_character(character: str) -> str:
    code = ord(character)
    if (found := _ESCAPES.get(character)) is not None:
        return found
    if character.isprintable():
        return character
    if 0xDC80 <= code <= 0xDCFF:  # A byte that is not UTF-8.
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def index_key(subject: bytes) -> str:
    """Return the key of a subject in the subscription index, as a pattern or as a name."""
    text = subject.decode("latin-1")
    if "#" in text:
        return ".".join(map(_escape_token, text.split(".")))
    return text


def _escape_token(token: str) -> str:
    return _ESCAPE + token if token.lstrip(_ESCAPE) == "#" else token


def class_subject(class_id: int, name: str) -> bytes:
    """Return the subject of a class's messages without a channel."""
    try:
        return decode_channel(f"class.{name}".encode()).encode() if name else b"class.%d" % class_id
    except RemoteProtocolError:  # A name that is no channel.
        return b"class.%d" % class_id
