"""Which subjects are legal, and how they are looked up.

Rule 1: a subject is bytes on the wire, and the text of the same bytes as Latin-1 inside: nothing is
lost, whatever they are.
Rule 2: NATS knows two wildcards, `*` and a `>` at the end. A token `#` is a letter like any other;
where it would be taken for the third wildcard of channels, it is escaped.
"""

from __future__ import annotations

from simplebus.core.limits import PATTERN_SEGMENTS_MAX

WILDCARD_ONE, WILDCARD_REST = b"*", b">"
_RESERVED = (b"_R_.", b"_GR_.", b"$JS.ACK.")
_ESCAPE = "\x00"
_ESCAPES = {"\\": r"\\", '"': r"\""} | dict(
    zip("\a\b\f\n\r\t\v", map("\\{}".format, "abfnrtv"), strict=True)
)


def is_legal(subject: bytes) -> bool:
    """Whether one may subscribe to it: no token is empty, `>` comes last."""
    tokens = subject.split(b".")
    return b"" not in tokens and WILDCARD_REST not in tokens[:-1]


def is_literal(subject: bytes) -> bool:
    """Whether one may publish on it, to be exact: legal, and no token is a wildcard."""
    tokens = subject.split(b".")
    return not (b"" in tokens or WILDCARD_ONE in tokens or WILDCARD_REST in tokens)


def has_wildcard(subject: bytes) -> bool:
    """Whether any of its tokens is a wildcard."""
    tokens = subject.split(b".")
    return WILDCARD_ONE in tokens or WILDCARD_REST in tokens


def is_too_deep(subject: bytes) -> bool:
    """Whether it has wildcards among more tokens than a pattern may have segments."""
    tokens = subject.split(b".")
    return len(tokens) > PATTERN_SEGMENTS_MAX and has_wildcard(subject)


def is_reserved_reply(reply: bytes) -> bool:
    """Whether no client may ask for answers there: servers answer each other so, and who answered
    there would acknowledge a message of its own unawares."""
    return reply.startswith(_RESERVED)


def to_text(subject: bytes) -> str:
    """As it is inside."""
    return subject.decode("latin-1")


def quote(subject: bytes) -> str:
    """As it is shown in an error line, from which a client reads it: as Go quotes text, which is
    UTF-8 but for what is escaped."""
    shown = "".join(map(_quote_character, subject.decode(errors="surrogateescape")))
    return f'"{shown}"'.encode().decode("latin-1")


def _quote_character(character: str) -> str:
    code = ord(character)
    if (found := _ESCAPES.get(character)) is not None:
        return found
    if character.isprintable():
        return character
    if 0xDC80 <= code <= 0xDCFF:  # A byte that is no UTF-8.
        return f"\\x{code - 0xDC00:02x}"
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def index_key(subject: bytes) -> str:
    """What stands for it in a sublist, as a pattern or as a name."""
    text = subject.decode("latin-1")
    if "#" in text:
        return ".".join(map(_escape_token, text.split(".")))
    return text


def _escape_token(token: str) -> str:
    return _ESCAPE + token if token.lstrip(_ESCAPE) == "#" else token
