"""Headers and subjects that belong to the NATS server, not to the messages that a bridge copies.

- `Nats-…` headers are instructions to, or results of, a server. They are not copied; a target
adds its own.
- `$…` and `_INBOX.…` are API subjects and reply subjects. A bridge publishes there only if a
  rewrite rule of its user names the subject, not because a channel has such a name.
- A message key becomes the header `bus-key` if it is plain text, otherwise `bus-key-hex`.
"""

from __future__ import annotations

import re

from simplebus.bridge.loop_header import Headers
from simplebus.nats.bus.convert import BLOCK_HEADER

SUBJECT_HEADER = "bus-subject"
"""Header for a subject that is not a valid channel."""
KEY_HEADER = "bus-key"
KEY_HEX_HEADER = "bus-key-hex"
_RESERVED_PREFIX = "nats-"
_INBOX = "_INBOX"
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_PERMISSION_VIOLATION = re.compile(r"Permissions Violation for (?:Publish|Subscription) to ")
_RANDOM_SUBJECT = re.compile(r'"(_INBOX\.|\$JS\.ACK\.)[^"]*"')
_PUBLISH_DENIED = re.compile(r'Permissions Violation for Publish to "((?:[^"\\]|\\.)*)"')


def strip_nats_headers(headers: Headers) -> Headers:
    """Return the headers without those of the NATS server, in any letter case."""
    return tuple(pair for pair in headers if not pair[0].lower().startswith(_RESERVED_PREFIX))


def strip_received_headers(headers: Headers) -> Headers:
    """Return the headers of a message from NATS without those of the server.

    A malformed header block is kept whole, because its headers are unknown.
    """
    return (
        headers if any(name == BLOCK_HEADER for name, _ in headers) else strip_nats_headers(headers)
    )


def encode_key(key: bytes) -> Headers:
    """Return the header that holds a key; none for an empty key."""
    if not key:
        return ()
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and text and text == text.strip():
        return ((KEY_HEADER, text),)
    return ((KEY_HEX_HEADER, key.hex()),)


def split_key(headers: Headers) -> tuple[Headers, bytes]:
    """Return the headers without key headers, and the key. The last key header counts."""
    key, other_headers = b"", []
    for name, value in headers:
        if name == KEY_HEADER:
            key = value.encode()
        elif name == KEY_HEX_HEADER and _HEX.fullmatch(value):
            key = bytes.fromhex(value)
        else:
            other_headers.append((name, value))
    return tuple(other_headers), key


def is_reserved_subject(subject: str) -> bool:
    """Return True for an API subject or a reply subject."""
    return subject.startswith("$") or subject.split(".", 1)[0] == _INBOX


def normalize_subjects(text: str) -> str:
    """Return an error text without random parts of subjects, so that repeats compare equal."""
    return _RANDOM_SUBJECT.sub(r'"\1>"', text)


def is_permission_violation(server_error: str) -> bool:
    """Return True if the user lacks a permission."""
    return _PERMISSION_VIOLATION.match(server_error) is not None


def is_required_permission_violation(server_error: str) -> bool:
    """Return True if every bridge needs the missing permission."""
    return (
        is_permission_violation(server_error) and normalize_subjects(server_error) != server_error
    )


def denied_subject(server_error: str) -> bytes:
    """Return the subject on which the user may not publish; empty for another error."""
    match = _PUBLISH_DENIED.match(server_error)
    if match is None:
        return b""
    # The server quotes subjects like Go source. Go's escapes are also Python's.
    escaped = match[1].encode("ascii", "backslashreplace")
    return escaped.decode("unicode_escape", "replace").encode("utf-8", "replace")
