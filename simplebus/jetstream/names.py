"""What classes, durables and groups are called in JetStream.

Rule 1: every door finds the same names for the same things, and no two things have one.
Rule 2: a letter that JetStream does not allow is written as = and two hexadecimal digits for each
byte; what is too long then, as a hash.

    class 7                          stream <prefix>_7, subject <prefix>.7
    durable orders, of no group      consumer d-orders
    group workers                    consumer g-workers
    a durable of a group             consumer g-workers-d-orders
    who has neither                  consumer p-<door>-<number>
    what waits for the first of all  consumer waiting
    which bus it is                  stream <prefix>_bus, subject <prefix>.bus
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote

CLUSTER_ID_PREFIX = "cluster."
"""What the identity of a bus begins with that a cluster keeps."""
BACKLOG_CONSUMER = "waiting"
_ALLOWED = re.compile(r"[A-Za-z0-9_]")
_PREFIX = re.compile(r"[A-Za-z0-9_]{1,32}")
_ESCAPED, _HASH = re.compile(r"=([0-9A-F]{2})"), re.compile(r"=[0-9a-f]{64}")
_NAME_BYTES_MAX = 120


def encode_token(text: str) -> str:
    """A text as a part of a name."""
    found = "".join(
        each if _ALLOWED.fullmatch(each) else "".join(f"={byte:02X}" for byte in each.encode())
        for each in text
    )
    if len(found) <= _NAME_BYTES_MAX:
        return found
    return "=" + hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JetStreamNames:
    """Of one engine. Raises ValueError for a prefix of other than 1 to 32 letters, digits and _."""

    prefix: str = "simplebus"
    """Several that share a cluster have several."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(
                f"the prefix {self.prefix!r}: expected 1 to 32 letters, digits or underscores"
            )

    def stream_name(self, class_id: int) -> str:
        return f"{self.prefix}_{class_id}"

    def class_subject(self, class_id: int) -> str:
        return f"{self.prefix}.{class_id}"

    @property
    def identity_stream_name(self) -> str:
        """Whose metadata say which bus it is."""
        return f"{self.prefix}_bus"

    @property
    def identity_subject(self) -> str:
        """A stream has to have one. Nothing is published to it."""
        return f"{self.prefix}.bus"

    def parse_stream_name(self, stream: str) -> int | None:
        """Which class a stream is of; None for another one."""
        head, _, number = stream.rpartition("_")
        is_ours = head == self.prefix and number.isascii() and number.isdigit() and len(number) < 6
        return int(number) if is_ours else None

    def overlaps_subject(self, subject: str) -> bool:
        """Whether what is published to classes, or said among doors, may be to this subject, which
        may have wildcards."""
        head, *rest = subject.split(".")
        if head not in (self.prefix, "*", ">"):
            return False
        match rest:
            case []:
                return head == ">"
            case [one]:
                is_class = self.parse_stream_name(f"{self.prefix}_{one}") is not None
                return is_class or one in ("*", ">", "naming")
            case [first, _]:
                return first in ("*", "door", "holder")
            case _:
                return False

    def server_subject(self, server_id: str) -> str:
        """Where a door answers as long as it is there."""
        return f"{self.prefix}.door.{encode_token(server_id)}"

    @property
    def names_query_subject(self) -> str:
        """Where every door tells whoever asks which classes have names."""
        return self.server_subject("names")

    def consumer_holder_subject(self, class_id: int, consumer: str) -> str:
        """Where the door answers that feeds somebody from the consumer of this name."""
        return f"{self.prefix}.holder.{class_id}-{consumer}"

    @property
    def new_names_subject(self) -> str:
        """Where doors tell each other of classes that have names."""
        return f"{self.prefix}.naming"


def consumer_name(durable: str, group: str) -> str:
    """Of a durable, a group, or both; empty for neither."""
    parts = [f"g-{encode_token(group)}"] if group else []
    parts += [f"d-{encode_token(durable)}"] if durable else []
    return "-".join(parts)


def belongs_to_durable(consumer: str, durable: str) -> bool:
    """Whether a consumer of a durable is this one's, in whichever group."""
    return consumer.split("-")[-2:] == ["d", encode_token(durable)]


def describe_consumer(consumer: str) -> str:
    """What a consumer of such a name is for, in words."""
    match consumer.split("-"):
        case ["d", durable]:
            return f"the durable {_decode_token(durable)}"
        case ["g", group]:
            return f"the group {_decode_token(group)}"
        case ["g", group, "d", durable]:
            return f"the durable {_decode_token(durable)} of the group {_decode_token(group)}"
        case _:
            return "a subscription without a name"


def _decode_token(token: str) -> str:
    """What a token was made of; of a long text only that it is one is known."""
    if _HASH.fullmatch(token):
        return "of a long name"
    escaped = _ESCAPED.sub(lambda found: f"%{found[1]}", token)
    return repr(unquote(escaped))
