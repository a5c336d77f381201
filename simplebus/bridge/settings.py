"""Settings of bridges and of the classes that they copy.

A bridge and its copiers are stored under their names: a bridge with another name, or a class with
another name, starts from the beginning.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from simplebus.bridge.channel_map import ChannelMap
from simplebus.bridge.loop_header import HOPS_MAX
from simplebus.client.credentials import Access
from simplebus.core.channel.pattern import check_pattern
from simplebus.core.limits import HEARTBEAT_SECONDS_MAX, NAME_CHARACTERS_MAX
from simplebus.core.message_class.last_values import BRIDGE_RECORDS_CLASS
from simplebus.core.protocol.requests import START_KEYWORDS

HEARTBEAT_SECONDS_MIN = 0.1
UNDER_WAY_MAX = 24_576
NATS_SCHEMES = ("nats://", "tls://")
_BRIDGE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STREAM_NAME = re.compile(r"[^\s.*>/\\]{1,255}")
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class CopiedClass:
    """A class that a bridge copies. Raises ValueError for contradictory settings."""

    class_: int | str
    """Class at the source. For a NATS source, the class at the target."""
    target_class: int | str | None = None
    """Class at the target; None for the same class."""
    channels: tuple[str, ...] = ()
    """Patterns of the channels to copy; empty for all. For a NATS source, its subjects."""
    rewrite: tuple[tuple[str, str], ...] = ()
    """Pattern and template of each rule that renames channels; see `ChannelMap`."""
    start: str = "waiting"
    """Start position of a copier that has never run."""
    stream: str = ""
    """JetStream stream to read, or that must store the messages; empty for core NATS."""
    under_way: int | None = None
    """Number of messages in flight into a stream; None for the default."""

    def __post_init__(self) -> None:
        if BRIDGE_RECORDS_CLASS in (self.class_, self.target_class):
            raise ValueError(
                f"the class {BRIDGE_RECORDS_CLASS!r} cannot be copied: it holds the records of "
                "bridges"
            )
        for pattern in self.channels:
            check_pattern(pattern)
        ChannelMap(self.rewrite)
        if self.stream and not _STREAM_NAME.fullmatch(self.stream):
            raise ValueError(
                f"invalid stream name {self.stream!r}: a stream's name has at most 255 "
                "characters, no white space, and none of . * > / \\"
            )
        if self.under_way is not None:
            if not 1 <= self.under_way <= UNDER_WAY_MAX:
                raise ValueError(f"under_way is from 1 to {UNDER_WAY_MAX}, got {self.under_way}")
            if not self.stream:
                raise ValueError("under_way needs a 'stream' at the target")
        if self.start not in START_KEYWORDS or self.start == "last_values":
            raise ValueError(f"start is one of waiting, new, earliest, last, got {self.start!r}")


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """A bridge between two servers. Raises ValueError for contradictory settings."""

    name: str
    source: str
    """Address of the source.

    A NATS cluster has several addresses, separated by commas. Empty for the server that runs the
    bridge.
    """
    target: str
    classes: tuple[CopiedClass, ...]
    is_bidirectional: bool = False
    """True if the classes are also copied from the target to the source."""
    hops_max: int = HOPS_MAX
    """Largest number of buses that a message may have passed when it arrives.

    With 1, only messages that were published at the source are copied.
    """
    heartbeat_seconds: float = 10.0
    """Silence after which a peer is checked. After three times as long the connection is lost."""
    has_path: bool = True
    """True if copied messages get the `bridge-path` header.

    False is possible for a NATS target only, if nothing is copied back from there: nothing else
    stops a message from circulating.
    """
    nats_credentials: dict[str, str] = field(default_factory=dict, repr=False)
    """User and password, token or seed for a NATS server. They override the access settings."""
    source_access: Access = field(default_factory=Access)
    """Credentials and TLS settings for the source."""
    target_access: Access = field(default_factory=Access)
    """Credentials and TLS settings for the target."""

    def __post_init__(self) -> None:
        if not _BRIDGE_NAME.fullmatch(self.name):
            raise ValueError(
                f"a bridge's name is 1 to 64 letters, digits, _ and -, got {self.name!r}"
            )
        if not self.classes:
            raise ValueError("a bridge copies at least one class, got none")
        if not 1 <= self.hops_max <= HOPS_MAX:
            raise ValueError(f"hops is from 1 to {HOPS_MAX}, got {self.hops_max}")
        if not HEARTBEAT_SECONDS_MIN <= self.heartbeat_seconds <= HEARTBEAT_SECONDS_MAX:
            raise ValueError(
                f"heartbeat is from {HEARTBEAT_SECONDS_MIN:g} to {HEARTBEAT_SECONDS_MAX:g} s, got "
                f"{self.heartbeat_seconds:g}"
            )
        if self.source == self.target and all(
            cls.target_class in (None, cls.class_) for cls in self.classes
        ):
            raise ValueError(f"source and target are the same: {self.source or 'this server'}")
        if self.is_bidirectional and any(cls.rewrite for cls in self.classes):
            raise ValueError("a bridge in both directions cannot rename channels; use two bridges")
        if not self.has_path and (self.is_bidirectional or not is_nats_address(self.target)):
            raise ValueError(
                "path = false needs a NATS server as target and one direction: between buses, only "
                "the path keeps a message from being copied in a loop"
            )
        if not is_nats_address(self.target) and any(cls.under_way for cls in self.classes):
            raise ValueError(
                "under_way needs a stream at the target, and this bridge leads to a bus"
            )
        if not (is_nats_address(self.source) or is_nats_address(self.target)):
            if self.nats_credentials:
                raise ValueError(
                    f"{', '.join(self.nats_credentials)}: only for a NATS server; credentials for "
                    "a bus belong in the table 'near' (source) or 'far' (target)"
                )
            if stream := next((cls.stream for cls in self.classes if cls.stream), ""):
                raise ValueError(f"stream {stream!r}: only a NATS server has streams")
        if is_nats_address(self.source) and (is_nats_address(self.target) or self.is_bidirectional):
            raise ValueError(
                "a bridge from NATS needs a bus as target; use another bridge for the way back"
            )


def check_loops(bridges: Sequence[BridgeSettings]) -> None:
    """Raise ValueError if messages without a `bridge-path` header could circulate."""
    pathless = next((bridge.name for bridge in bridges if not bridge.has_path), None)
    for bridge in bridges:
        if pathless and (
            is_nats_address(bridge.source)
            or (bridge.is_bidirectional and is_nats_address(bridge.target))
        ):
            raise ValueError(
                f"bridge {pathless!r} has path = false, and bridge {bridge.name!r} reads from "
                "NATS: a message could be copied in a loop"
            )


def is_nats_address(address: str) -> bool:
    """Return True for the address of a NATS server."""
    return address.startswith(NATS_SCHEMES)


def copier_name(bridge: str, class_: int | str, *, back: bool) -> str:
    """Return the name of a copier, which it uses at both ends."""
    direction = "back" if back else "there"
    name = f"bridge {bridge} {direction} {class_}"
    if len(name) > NAME_CHARACTERS_MAX:
        name = f"{name[: NAME_CHARACTERS_MAX - 9]} {zlib.crc32(name.encode()):08x}"
    return name


def record_channel(bridge: str, class_: int | str, *, back: bool) -> str:
    """Return the channel of a copier's bridge records."""
    plain = _UNSAFE_CHARACTERS.sub("-", str(class_))
    if plain != str(class_):
        plain += f"-{zlib.crc32(str(class_).encode()):08x}"
    return f"{bridge}.{'back' if back else 'there'}.{plain}"
