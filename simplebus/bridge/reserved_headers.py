"""What of a NATS server's names is its own, and not for messages that a bridge copies.

Rule 1: headers `Nats-…` tell a server what to do with a message, or what it did: they stay behind,
both ways. The bridge says its own.
Rule 2: subjects `$…` and `_INBOX.…` are a server's API, and answers to somebody. A message is
published there if the bridge's user has said so in a rewrite, not because a channel is called so.
Rule 3: a key is the header `bus-key` where it is text that comes through as it is, and otherwise
`bus-key-hex`, two digits for each byte: it comes back the same.
Rule 4: a server's complaints show subjects as Go quotes text, with escapes.
"""

from __future__ import annotations

import re

from simplebus.bridge.loop_header import Headers
from simplebus.nats.bus.convert import BLOCK_HEADER

SUBJECT = "bus-subject"
"""The header that says a subject which can be no channel."""
KEY = "bus-key"
KEY_HEX = "bus-key-hex"
_HEADER = "nats-"
_INBOX = "_INBOX"
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_BARRED = re.compile(r"Permissions Violation for (?:Publish|Subscription) to ")
_NEW_EACH_TIME = re.compile(r'"(_INBOX\.|\$JS\.ACK\.)[^"]*"')
_DENIED = re.compile(r'Permissions Violation for Publish to "((?:[^"\\]|\\.)*)"')


def without_words(headers: Headers) -> Headers:
    """Headers without those that are the server's own, in whatever case."""
    return tuple(pair for pair in headers if not pair[0].lower().startswith(_HEADER))


def heard(headers: Headers) -> Headers:
    """The same of a message from NATS. A block that is odd stays: it is all that there is."""
    return headers if any(name == BLOCK for name, _ in headers) else without_words(headers)


def key_headers(key: bytes) -> Headers:
    """The header that says a key; none for no key."""
    if not key:
        return ()
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = ""
    if text.isprintable() and text and text == text.strip():
        return ((KEY, text),)
    return ((KEY_HEX, key.hex()),)


def without_key(headers: Headers) -> tuple[Headers, bytes]:
    """Headers without those that say the key, and that: what the last of them says."""
    key, rest = b"", []
    for name, value in headers:
        if name == KEY:
            key = value.encode()
        elif name == KEY_HEX and _HEX.fullmatch(value):
            key = bytes.fromhex(value)
        else:
            rest.append((name, value))
    return tuple(rest), key


def is_reserved(subject: str) -> bool:
    """Whether it is the server's, or somebody's inbox."""
    return subject.startswith("$") or subject.split(".", 1)[0] == _INBOX


def alike(text: str) -> str:
    """What is said of a subject, without what is another one each time: who says each thing once
    compares that."""
    return _NEW_EACH_TIME.sub(r'"\1>"', text)


def is_barred(complaint: str) -> bool:
    """Whether this says that its user may not do something;"""
    return _BARRED.match(complaint) is not None


def is_essential(complaint: str) -> bool:
    """and that no bridge can do without that."""
    return is_barred(complaint) and alike(complaint) != complaint


def denied(complaint: str) -> bytes:
    """The subject on which this says that nobody may publish; empty for another complaint."""
    match = _DENIED.match(complaint)
    if match is None:
        return b""
    # Go's escapes are Python's.
    shown = match[1].encode("ascii", "backslashreplace")
    return shown.decode("unicode_escape", "replace").encode("utf-8", "replace")
