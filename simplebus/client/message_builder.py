"""Builds payload, class id and envelope from the arguments of the publish methods. No I/O.

A class with a name is named to the server once, before its first use; from then on its id is found
in a dict. A message without options needs no envelope, which is the fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from simplebus.client.core import arguments
from simplebus.client.core.client import ClientCore
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.message_types import Binding, Registry
from simplebus.core.channel.pattern import check_name
from simplebus.core.errors import BusError
from simplebus.core.protocol.durability import Durability
from simplebus.core.protocol.envelope_batch import Envelope
from simplebus.core.protocol.requests import NamedClass

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
"""Header names and values; pairs if a name occurs several times."""


class PublishOptions(TypedDict, total=False):
    """Options of a published message, or of each of many."""

    channel: str
    """Dotted channel name, for example `orders.eu.paid`, that subscriptions select by pattern."""
    key: bytes
    """Key for key-ordered groups, for example a customer number."""
    headers: Headers | None
    """Headers that travel with the message."""
    expires: float | None
    """Seconds after its acceptance by the server until the message expires; 0 expires it at
    once.
    """
    delay: float | None
    """Seconds after its acceptance by the server before which the message is not delivered."""


DurabilityName = Literal["memory", "os", "disk"]
"""Durability of a confirmed message: in the server's memory, written to the operating system,
or synced to disk.
"""

DURABILITY_NAMES: dict[Durability, DurabilityName] = {
    Durability.MEMORY: "memory",
    Durability.OS: "os",
    Durability.DISK: "disk",
}

PublishRoute = tuple[Callable[[Any], bytes], int]
"""Encoder and class id for the values of one type."""

_MILLISECONDS_MAX = (1 << 64) - 1
# Channels whose envelopes are cached, for messages with no other option.
_CACHED_CHANNELS_MAX = 4096


class BusFullError(BusError):
    """`publish_nowait` would have to wait, for credit or a class id. Nothing was published."""


class MessageBuilder:
    """Classes, routes and cached envelopes of one bus."""

    def __init__(self, core: ClientCore, registry: Registry) -> None:
        self.route_by_type: dict[type, PublishRoute] = {}
        """Known routes, by the exact type of a value."""
        self.class_id_by_name: dict[str, int] = {}
        """Class ids that the server has assigned."""
        self._core = core
        self._registry = registry
        self._pending_namings: dict[str | None, OpenRequest] = {}
        """Requests from `poll_class_id`, by class name."""
        self._envelope_by_channel: dict[str, Envelope] = {}

    # Classes -------------------------------------------------------------------------------------

    def name_class(self, class_reference: Binding[Any] | str) -> OpenRequest:
        """Request the id of a class."""
        if isinstance(class_reference, str):
            return self._core.name_classes(class_reference)
        assert class_reference.name is not None
        class_name = (
            class_reference.name
            if class_reference.class_id is None
            else NamedClass(class_reference.class_id, class_reference.name)
        )
        return self._core.name_classes(class_name)

    def get_binding(self, type_: type[Any]) -> Binding[Any]:
        """Return the binding of a type. Raises UnboundTypeError."""
        return self._registry.bindings[type_]

    def find_class_id(self, class_reference: Binding[Any] | str | int) -> int | None:
        """Return the id of a class; None if it must be requested first."""
        if isinstance(class_reference, int):
            return class_reference
        if isinstance(class_reference, str):
            return self.class_id_by_name.get(class_reference)
        if not isinstance(class_reference, Binding):
            raise TypeError(
                f"expected a class id or class name, got {class_reference!r}; "
                "a value whose type is bound to a class is published without one"
            )
        if class_reference.name is None:
            return class_reference.class_id
        return self.class_id_by_name.get(class_reference.name)

    def poll_class_id(self, class_reference: Binding[Any] | str | int) -> int | None:
        """Return the id of a class if the server has replied; otherwise request it."""
        assert not isinstance(class_reference, int)
        name = class_reference if isinstance(class_reference, str) else class_reference.name
        request = self._pending_namings.get(name)
        if request is None or (request.is_done and request.error is not None):
            self._pending_namings[name] = self.name_class(class_reference)
            return None
        return self.store_class_id(class_reference) if request.is_done else None

    def store_class_id(self, class_reference: Binding[Any] | str) -> int:
        """Store and return the class id from the reply to `name_class`."""
        name = class_reference if isinstance(class_reference, str) else class_reference.name
        assert name is not None
        class_id = self._core.find_class_id(name)
        if class_id is None:
            raise BusError(
                f"the server assigned no id to class {name!r}, expected one in its reply"
            )
        self.class_id_by_name[name] = class_id
        return class_id

    def add_route(self, binding: Binding[Any], class_id: int) -> PublishRoute:
        """Store and return the route for the values of a type."""
        route = self.route_by_type[binding.type] = binding.encode, class_id
        return route

    # Messages ------------------------------------------------------------------------------------

    def encode_payload(self, value: object) -> bytes:
        """Return the payload of a value, by the codec of its type; bytes are unchanged."""
        if type(value) is bytes:
            return value
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
        **unknown_options: object,
    ) -> Envelope | None:
        """Return the envelope for these options; None if none is needed. Times are in seconds.

        Raises:
            ValueError: If an option is out of range or invalid.
            TypeError: If an option has the wrong type or is unknown.
        """
        if unknown_options:
            arguments.reject_unknown_names(
                unknown_options, ("class_id", "confirm", *PublishOptions.__annotations__)
            )
        if not key and not headers and expires is None and delay is None:
            if not channel:
                return None
            envelope = self._envelope_by_channel.get(arguments.check_text("channel", channel))
            if envelope is None:
                if len(self._envelope_by_channel) >= _CACHED_CHANNELS_MAX:
                    self._envelope_by_channel.clear()
                envelope = self._envelope_by_channel[channel] = Envelope(
                    channel=check_name(channel)
                )
            return envelope
        return Envelope(
            channel=check_name(arguments.check_text("channel", channel)) if channel else "",
            key=_check_bytes("key", key) if key else b"",
            headers=header_pairs(headers),
            expires_ms=None if expires is None else to_milliseconds("expires", expires),
            not_before_ms=None if delay is None else to_milliseconds("delay", delay),
        )


def to_milliseconds(name: str, seconds: float) -> int:
    """Return seconds as whole milliseconds, limited to 64 bits. Infinity gives the maximum.

    Raises:
        ValueError: If `seconds` is negative.
    """
    return round(min(arguments.check_seconds(name, seconds) * 1000, _MILLISECONDS_MAX))


def header_pairs(headers: Headers | None) -> tuple[tuple[str, str], ...]:
    """Return headers as pairs of texts. Raises TypeError if they are not texts."""
    if not headers:
        return ()
    try:
        pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
    except TypeError:
        pairs = (headers,)  # type: ignore[assignment]
    for pair in pairs:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(
                f"headers must be a dict of texts, or pairs of a name and a value, got {headers!r}"
            )
        name, value = pair
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"a header is two texts, got {name!r}: {value!r}")
    return pairs


def _check_bytes(name: str, value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{name} must be bytes, got {value!r}")
