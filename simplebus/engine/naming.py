"""Which classes there are in a cluster, and what they are called: learnt once, and told from door
to door (trio).

Rule 1: a class has the name that it had first, at whichever door.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import trio

from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.requests import ClassId, Name, NamedClass
from simplebus.engine.positions import Positions
from simplebus.nats.client.jetstream import JetStreamError

log = logging.getLogger("simplebus.engine")

_PAUSE_SECONDS = 0.25
_TOLD_AT_ONCE = 4
"""Names in a message: few, so that it is never too long."""


class Naming:
    """Of one door."""

    def __init__(
        self, names: Mapping[str, int], name_classes: Callable[[list[Any]], object]
    ) -> None:
        self._names = names
        """Those that are known here."""
        self._name_classes = name_classes
        self._told: dict[str, int] = {}

    async def learn(self, positions: Positions) -> None:
        """Ask until it is known."""
        while True:
            try:
                found = await positions.classes()
                break
            except (BusConnectionError, JetStreamError) as error:
                log.warning("the streams of the cluster: %s; trying on", error)
                await trio.sleep(_PAUSE_SECONDS)
        for class_id, name in found:
            self._name(class_id, name)

    def _name(self, class_id: int, name: str) -> None:
        try:
            self._name_classes([NamedClass(id=class_id, name=name) if name else class_id])
        except RemoteProtocolError as error:
            log.warning("class %d of the cluster: %s", class_id, error.sentence)

    def fresh(self) -> list[bytes]:
        """What other doors are to hear: names that are new here, in messages that any server
        takes."""
        if len(self._names) == len(self._told):
            return []
        fresh = {name: id_ for name, id_ in self._names.items() if name not in self._told}
        self._told = dict(self._names)
        pieces: list[dict[str, int]] = [{}]
        for name, class_id in fresh.items():
            if len(pieces[-1]) == _TOLD_AT_ONCE:
                pieces.append({})
            pieces[-1][name] = class_id
        return [msgspec.json.encode(piece) for piece in pieces if piece]

    def tell_again(self) -> None:
        """Nobody may have heard of any."""
        self._told.clear()

    def hear(self, payload: bytes) -> None:
        """Another door has said something."""
        try:
            told = msgspec.json.decode(payload, type=dict[Name, ClassId])
        except (msgspec.MsgspecError, RecursionError):
            return
        for name, class_id in told.items():
            if self._names.get(name) != class_id:
                self._name(class_id, name)
            if self._names.get(name) == class_id:
                self._told[name] = class_id
