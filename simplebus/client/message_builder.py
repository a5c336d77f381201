"""What a program publishes, made into payload, class id and envelope. No I/O, no waiting.

Rule 1: a value's class is that of its type's binding; bytes have the class that stands beside them.
Rule 2: a class that has a name is named to the bus once, before its first use, and what a driver
has to wait for is its answer. From then on a look into a dict is all.
Rule 3: a message of which nothing is said but its class has no envelope: it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from simplebus.client.core import arguments
from simplebus.client.core.client import ClientCore
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.message_types import Binding, Registry
from simplebus.core.channel.pattern import check_name
from simplebus.core.commit_log import Durability
from simplebus.core.errors import BusError
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.requests import NamedClass

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
"""Names and values; pairs when a name is there more than once."""


class PublishOptions(TypedDict, total=False):
    """What may be said about a message, or about each of many."""

    channel: str
    """A dotted name, such as `orders.eu.paid`, that subscriptions may ask for by pattern."""
    key: bytes
    """What belongs together, such as a customer's number."""
    headers: Headers | None
    expires: float | None
    """Seconds from its acceptance by the bus after which nobody gets it; 0 for nobody at all."""
    delay: float | None
    """Seconds from its acceptance by the bus before which nobody gets it."""


Durability = Literal["memory", "os", "disk"]
"""Where a message is when it is confirmed: in the bus's memory, with its operating system, or on
its disk."""

DURABILITIES: dict[Durability, Durability] = {
    Durability.MEMORY: "memory",
    Durability.OS: "os",
    Durability.DISK: "disk",
}

PublishRoute = tuple[Callable[[Any], bytes], int]
"""How values of a type become payloads, and of which class they are."""

_MILLISECONDS_MAX = (1 << 64) - 1
# Channels whose envelopes are kept, for messages that have nothing else.
_CHANNELS_MAX = 4096


class BusFullError(BusError):
    """A `publish_nowait` would have had to wait. Nothing was published."""


class MessageBuilder:
    """What one bus knows of the classes that it publishes to."""

    def __init__(self, core: ClientCore, registry: Registry) -> None:
        self.route_by_type: dict[type, PublishRoute] = {}
        """By the exact type of a value: those that were resolved."""
        self.class_id_by_name: dict[str, int] = {}
        """By the name of a class: those that the bus has told."""
        self._core = core
        self._registry = registry
        self._hurried: dict[str | None, OpenRequest] = {}
        """What was asked without waiting for the answer, by the name of the class."""
        self._channels: dict[str, Envelope] = {}

    # Classes -------------------------------------------------------------------------------------

    def name_class(self, what: Binding[Any] | str) -> OpenRequest:
        """Name a class to the bus: one whose id is not known."""
        if isinstance(what, str):
            return self._core.name_classes(what)
        assert what.name is not None
        named = what.name if what.class_id is None else NamedClass(what.class_id, what.name)
        return self._core.name_classes(named)

    def get_binding(self, type_: type[Any]) -> Binding[Any]:
        """A type's binding. Raises UnboundTypeError."""
        return self._registry.bindings[type_]

    def find_class_id(self, what: Binding[Any] | str | int) -> int | None:
        """The id of a class; None when the bus has to be asked for it first."""
        if isinstance(what, int):
            return what
        if isinstance(what, str):
            return self.class_id_by_name.get(what)
        if not isinstance(what, Binding):
            raise TypeError(
                f"a class is given by its id or its name, got {what!r}; a value whose type is "
                "bound to a class is published without one"
            )
        if what.name is None:
            return what.class_id
        return self.class_id_by_name.get(what.name)

    def poll_class_id(self, what: Binding[Any] | str | int) -> int | None:
        """The id of a class if the bus has answered by now; otherwise it was asked."""
        assert not isinstance(what, int)
        name = what if isinstance(what, str) else what.name
        asked = self._hurried.get(name)
        if asked is None or (asked.is_done and asked.error is not None):
            self._hurried[name] = self.ask(what)
            return None
        return self.store_class_id(what) if asked.is_done else None

    def store_class_id(self, what: Binding[Any] | str) -> int:
        """The bus has answered `ask`: the id of that class, which is known from now on."""
        name = what if isinstance(what, str) else what.name
        assert name is not None
        class_id = self._core.find_class_id(name)
        if class_id is None:
            raise BusError(f"the bus gave no id to the class {name!r}, expected one in its answer")
        self.class_id_by_name[name] = class_id
        return class_id

    def add_route(self, binding: Binding[Any], class_id: int) -> PublishRoute:
        """From now on values of this type go that way."""
        found = self.route_by_type[binding.type] = binding.encode, class_id
        return found

    # Messages ------------------------------------------------------------------------------------

    def encode_payload(self, value: object) -> bytes:
        """A value by its type's codec, whatever its class; bytes as they are."""
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        return self._registry.bindings[type(value)].encode(value)

    def build_envelope(
        self,
        *,
        channel: str = "",
        key: bytes = b"",
        headers: Headers | None = None,
        expires: float | None = None,
        delay: float | None = None,
        **unknown: object,
    ) -> Envelope | None:
        """What goes with a message. Raises ValueError and TypeError for what cannot."""
        if unknown:
            arguments.reject_unknown_names(unknown, ("class_id", "confirm", *PublishOptions.__annotations__))
        if not key and not headers and expires is None and delay is None:
            if not channel:
                return None
            found = self._channels.get(arguments.check_text("channel", channel))
            if found is None:
                if len(self._channels) >= _CHANNELS_MAX:
                    self._channels.clear()
                found = self._channels[channel] = Envelope(channel=check_name(channel))
            return found
        return Envelope(
            channel=check_name(arguments.check_text("channel", channel)) if channel else "",
            key=_bytes("key", key) if key else b"",
            headers=header_pairs(headers),
            expires_ms=None if expires is None else to_milliseconds("expires", expires),
            not_before_ms=None if delay is None else to_milliseconds("delay", delay),
        )


def to_milliseconds(name: str, seconds: float) -> int:
    """Seconds as the wire has them. Raises ValueError for what is no span of time.

    None is as long as the wire can say: what is longer, for ever included, is cut to it.
    """
    return round(min(arguments.check_seconds(name, seconds) * 1000, _MILLISECONDS_MAX))


def header_pairs(headers: Headers | None) -> tuple[tuple[str, str], ...]:
    """Headers as an envelope has them. Raises TypeError for what is no text."""
    if not headers:
        return ()
    try:
        found = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    except TypeError:
        found = (headers,)  # type: ignore[assignment]
    for pair in found:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                f"headers must be a dict of texts, or pairs of a name and a value, got {headers!r}"
            )
        name, value = pair
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"a header is two texts, got {name!r}: {value!r}")
    return found


def _bytes(name: str, given: object) -> bytes:
    """Raises TypeError for what is none."""
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given)
    raise TypeError(f"{name} must be bytes, got {given!r}")
