"""Names of streams, consumers and subjects in JetStream.

All servers derive the same names. A character that JetStream does not allow is encoded as `=` and
two hexadecimal digits per byte; a name that becomes too long is replaced by its hash.

    class 7                        stream <prefix>_7, subject <prefix>.7
    durable orders, no group       consumer d-orders
    group workers                  consumer g-workers
    durable of a group             consumer g-workers-d-orders
    subscription without a name    consumer p-<server id>-<number>
    messages without subscriber    consumer waiting
    bus identity                   stream <prefix>_bus, subject <prefix>.bus
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import unquote

CLUSTER_ID_PREFIX = "cluster."
"""First part of a bus id that is stored in a cluster."""
BACKLOG_CONSUMER = "waiting"
"""Consumer that keeps the messages for the first subscription of a class."""
_ALLOWED = re.compile(r"[A-Za-z0-9_]")
_PREFIX = re.compile(r"[A-Za-z0-9_]{1,32}")
_ESCAPED, _HASH = re.compile(r"=([0-9A-F]{2})"), re.compile(r"=[0-9a-f]{64}")
_NAME_BYTES_MAX = 120


def encode_token(text: str) -> str:
    """Encode `text` as one token of a JetStream name."""
    found = "".join(
        character
        if _ALLOWED.fullmatch(character)
        else "".join(f"={byte:02X}" for byte in character.encode())
        for character in text
    )
    if len(found) <= _NAME_BYTES_MAX:
        return found
    return "=" + hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class JetStreamNames:
    """Names that begin with one prefix.

    Raises:
        ValueError: The prefix is not 1 to 32 letters, digits or underscores.
    """

    prefix: str = "simplebus"
    """Buses that share a cluster need different prefixes."""

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
        """Stream whose metadata contain the bus id."""
        return f"{self.prefix}_bus"

    @property
    def identity_subject(self) -> str:
        """Subject of the identity stream, which is required but never published to."""
        return f"{self.prefix}.bus"

    def parse_stream_name(self, stream: str) -> int | None:
        """Return the class id of a stream, or None if the stream does not belong to a class."""
        head, _, number = stream.rpartition("_")
        is_ours = head == self.prefix and number.isascii() and number.isdigit() and len(number) < 6
        return int(number) if is_ours else None

    def overlaps_subject(self, subject: str) -> bool:
        """Return True if `subject`, which may contain wildcards, matches a subject of this bus."""
        head, *tokens = subject.split(".")
        if head not in (self.prefix, "*", ">"):
            return False
        match tokens:
            case []:
                return head == ">"
            case [token]:
                is_class = self.parse_stream_name(f"{self.prefix}_{token}") is not None
                return is_class or token in ("*", ">", "naming")
            case [first, _]:
                return first in ("*", "door", "holder")
            case _:
                return False

    def server_subject(self, server_id: str) -> str:
        """Subject at which a running server answers."""
        return f"{self.prefix}.door.{encode_token(server_id)}"

    @property
    def names_query_subject(self) -> str:
        """Subject at which every server answers with its class names."""
        return self.server_subject("names")

    def consumer_holder_subject(self, class_id: int, consumer: str) -> str:
        """Subject at which the servers that fetch from a consumer answer."""
        return f"{self.prefix}.holder.{class_id}-{consumer}"

    @property
    def new_names_subject(self) -> str:
        """Subject at which servers publish new class names."""
        return f"{self.prefix}.naming"


def consumer_name(durable: str, group: str) -> str:
    """Return the consumer of a durable, a group, or both; empty if both are empty."""
    parts = [f"g-{encode_token(group)}"] if group else []
    parts += [f"d-{encode_token(durable)}"] if durable else []
    return "-".join(parts)


def belongs_to_durable(consumer: str, durable: str) -> bool:
    """Return True if a consumer belongs to `durable`, in any group."""
    return consumer.split("-")[-2:] == ["d", encode_token(durable)]


def describe_consumer(consumer: str) -> str:
    """Return a description of a consumer for log lines and reports."""
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
    """Return the text of a token. A hashed text cannot be recovered."""
    if _HASH.fullmatch(token):
        return "with a long name"
    escaped = _ESCAPED.sub(lambda found: f"%{found[1]}", token)
    return repr(unquote(escaped))
