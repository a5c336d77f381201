"""What is copied from where to where.

Rule 1: names last: a bridge that is called otherwise, or copies a class under another name, is
another one, and begins anew.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from simplebus.bridge.channel_map import Renaming
from simplebus.bridge.loop_header import HOPS_MAX
from simplebus.client.credentials import Access
from simplebus.core.channel.pattern import check_pattern
from simplebus.core.limits import HEARTBEAT_SECONDS_MAX, NAME_CHARACTERS_MAX
from simplebus.core.message_class.last_values import BRIDGE_RECORDS_CLASS
from simplebus.core.protocol.requests import STARTS

HEARTBEAT_SECONDS_MIN = 0.1
UNDER_WAY_MAX = 24_576
NATS_SCHEMES = ("nats://", "tls://")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STREAM_NAME = re.compile(r"[^\s.*>/\\]{1,255}")
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class CopiedClass:
    """A class that is copied. Raises ValueError for what makes no sense."""

    class_: int | str
    """At the near end; of a NATS server: the class that messages get at the far end."""
    target_class: int | str | None = None
    """Its class at the far end; None for the same."""
    channels: tuple[str, ...] = ()
    """Only what one of these matches; none: everything. Of a NATS server: its subjects."""
    rewrite: tuple[tuple[str, str], ...] = ()
    """How channels are renamed; see `channels.Renaming`."""
    start: str = "waiting"
    """Where a lane begins that was never there."""
    stream: str = ""
    """Of a NATS server: the stream of JetStream that is read, or that has to take what is
    published; empty for NATS without JetStream."""
    under_way: int | None = None
    """So many messages are on their way into a stream at once; None for what is good for it."""

    def __post_init__(self) -> None:
        if BRIDGE_RECORDS_CLASS in (self.class_, self.target_class):
            raise ValueError(
                f"the class {BRIDGE_RECORDS_CLASS!r} is not copied: there a bus has written down "
                "where lanes are"
            )
        for pattern in self.channels:
            check_pattern(pattern)
        Renaming(self.rewrite)
        if self.stream and not _STREAM_NAME.fullmatch(self.stream):
            raise ValueError(
                f"no stream can be called {self.stream!r}: a stream's name has at most 255 "
                "characters, no white space, and none of . * > / \\"
            )
        if self.under_way is not None:
            if not 1 <= self.under_way <= UNDER_WAY_MAX:
                raise ValueError(f"under_way is from 1 to {UNDER_WAY_MAX}, got {self.under_way}")
            if not self.stream:
                raise ValueError("under_way is of messages on their way into a 'stream'")
        if self.start not in STARTS or self.start == "last_values":
            raise ValueError(f"start is one of waiting, new, earliest, last, got {self.start!r}")


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """A bridge between two servers. Raises ValueError for what makes no sense."""

    name: str
    source: str
    """An address; of a cluster of NATS servers several, with commas between; empty for the server
    that the bridge is part of."""
    target: str
    classes: tuple[CopiedClass, ...]
    is_bidirectional: bool = False
    """Whether the same classes are copied back, too."""
    hops_max: int = HOPS_MAX
    """How many buses a message may have come over when it arrives; 1: it was published at the near
    end."""
    heartbeat_seconds: float = 10.0
    """Seconds of silence after which an end is looked after; at three times as many it is lost."""
    has_path: bool = True
    """Whether messages say where they have been. Only to a NATS server can that be left out, where
    nothing that is copied there comes back: there is nothing else that ends a circle."""
    nats_credentials: dict[str, str] = field(default_factory=dict, repr=False)
    """For a NATS server: user and password, token, or seed; before what its access says."""
    source_access: Access = field(default_factory=Access)
    """Who the bridge is at the near end, and whom it trusts there over TLS."""
    target_access: Access = field(default_factory=Access)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a bridge's name is 1 to 64 letters, digits, _ and -, got {self.name!r}"
            )
        if not self.classes:
            raise ValueError("a bridge copies one class at least, got none")
        if not 1 <= self.hops_max <= HOPS_MAX:
            raise ValueError(f"hops is from 1 to {HOPS_MAX}, got {self.hops_max}")
        if not HEARTBEAT_SECONDS_MIN <= self.heartbeat_seconds <= HEARTBEAT_SECONDS_MAX:
            raise ValueError(
                f"heartbeat is from {HEARTBEAT_SECONDS_MIN:g} to {HEARTBEAT_SECONDS_MAX:g} s, got "
                f"{self.heartbeat_seconds:g}"
            )
        if self.source == self.target and all(each.target_class in (None, each.class_) for each in self.classes):
            raise ValueError(f"{self.source or 'a server'} is copied to itself")
        if self.is_bidirectional and any(each.rewrite for each in self.classes):
            raise ValueError("a bridge in both directions renames no channels; make it two bridges")
        if not self.has_path and (self.is_bidirectional or not is_nats_address(self.target)):
            raise ValueError(
                "path can be left out to a NATS server, in one direction: from bus to bus it is "
                "what keeps a ring from copying a message for ever"
            )
        if not is_nats_address(self.target) and any(each.under_way for each in self.classes):
            raise ValueError("under_way is of a bridge into a stream: this one leads to a bus")
        if not (is_nats_address(self.source) or is_nats_address(self.target)):
            if self.nats_credentials:
                raise ValueError(
                    f"{', '.join(self.nats_credentials)}: these are for a NATS server; who a bridge is "
                    "at a bus stands in its table near or far"
                )
            if stream := next((each.stream for each in self.classes if each.stream), ""):
                raise ValueError(f"stream {stream!r}: only a NATS server has streams")
        if is_nats_address(self.source) and (is_nats_address(self.target) or self.is_bidirectional):
            raise ValueError("one end of a bridge is a bus, and the way back another bridge")


def check_loops(bridges: Sequence[BridgeSettings]) -> None:
    """Raise ValueError where messages that do not say where they have been could come back."""
    silent = next((each.name for each in bridges if not each.has_path), None)
    for bridge in bridges:
        if silent and (is_nats_address(bridge.source) or (bridge.is_bidirectional and is_nats_address(bridge.target))):
            raise ValueError(
                f"bridge {silent!r} leaves out the path, and bridge {bridge.name!r} reads from a "
                "NATS server: what came back would be copied for ever"
            )


def is_nats_address(address: str) -> bool:
    """Whether it is that of a NATS server."""
    return address.startswith(NATS_SCHEMES)


def copier_name(bridge: str, class_: int | str, *, back: bool) -> str:
    """What a lane is known by at both ends."""
    way = "back" if back else "there"
    name = f"bridge {bridge} {way} {class_}"
    if len(name) > NAME_CHARACTERS_MAX:
        name = f"{name[: NAME_CHARACTERS_MAX - 9]} {zlib.crc32(name.encode()):08x}"
    return name


def record_channel(bridge: str, class_: int | str, *, back: bool) -> str:
    """The channel of a lane's records."""
    plain = _UNSAFE_CHARACTERS.sub("-", str(class_))
    if plain != str(class_):
        plain += f"-{zlib.crc32(str(class_).encode()):08x}"
    return f"{bridge}.{'back' if back else 'there'}.{plain}"
