"""What of a NATS server's names is its own, and not for messages that a bridge copies.

Rule 1: headers `Nats-…` tell a server what to do with a message, or what it did: they stay behind,
both ways. The bridge says its own.
Rule 2: subjects `$…` and `_INBOX.…` are a server's API, and answers to somebody. A message is
published there if the bridge's user has said so in a rewrite, not because a channel is called so.
"""

from __future__ import annotations

from simplebus.bridge.origin import Headers
from simplebus.nats.envelopes import BLOCK

_HEADER = "nats-"
_INBOX = "_INBOX"


def without_words(headers: Headers) -> Headers:
    """Headers without those that are the server's own, in whatever case."""
    return tuple(pair for pair in headers if not pair[0].lower().startswith(_HEADER))


def heard(headers: Headers) -> Headers:
    """The same of a message from NATS. A block that is odd stays: it is all that there is."""
    return headers if any(name == BLOCK for name, _ in headers) else without_words(headers)


def is_reserved(subject: str) -> bool:
    """Whether it is the server's, or somebody's inbox."""
    return subject.startswith("$") or subject.split(".", 1)[0] == _INBOX
