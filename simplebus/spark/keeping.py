"""What a query has the buses keep: what it has not processed, on each of them, and nothing else.

Rule 1: what it needs is taken before what it had is let go of: its name, its classes and its buses
may be others than before.
Rule 2: a bus that does not answer keeps what it keeps. Whether that ends the query is not decided
here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from simplebus.core.errors import BusConnectionError, RefusedError
from simplebus.spark.buses import Buses
from simplebus.spark.offsets import Memories, Offsets
from simplebus.spark.pin import Pin, PinError
from simplebus.spark.planner import firsts

log = logging.getLogger("simplebus.spark")


class NotKeeping:
    """Of a query that reads journals: nobody keeps anything for it."""

    is_begun = True

    def begin(
        self, server: str, classes: Mapping[str, int], *, with_waiting: bool
    ) -> dict[str, int]:
        """What it may begin with is where it is."""
        return dict(classes)

    def keep(self, offsets: Offsets, memories: Memories, durable: str) -> None:
        """Nobody is told."""

    def lost(self, server: str) -> None:
        """Nothing was held."""


class Keeping:
    """Of one query, as long as it runs. The connections are those of `buses`."""

    def __init__(self, buses: Buses) -> None:
        self._buses = buses
        self._durable = ""
        """The name of the pins."""
        self._pins: dict[str, Pin] = {}
        self._first_pins: dict[str, Pin] = {}
        """Keep what the query begins with until it has begun."""

    @property
    def is_begun(self) -> bool:
        """Whether anything is kept."""
        return any(pin.is_held for pin in self._pins.values())

    def begin(
        self, server: str, classes: Mapping[str, int | str], *, with_waiting: bool
    ) -> dict[str, int]:
        """Keep what the query may begin with, as long as this connection lasts; `with_waiting`, as
        the first who comes for it. Returns where that is."""
        pin = self._first_pins[server] = Pin(self._buses.bus(server), "")
        found = {name: pin.move(name, at) for name, at in classes.items()}
        if with_waiting:
            for name in classes:
                pin.take_waiting(name)
        return found

    def keep(self, offsets: Offsets, memories: Memories, durable: str) -> None:
        """Keep what lies behind these offsets, under this name, and nothing before them.

        Raises PinError, BusConnectionError.
        """
        former: dict[str, Pin] = {}
        if durable != self._durable:
            former, self._pins, self._durable = self._pins, {}, durable
        for (server, name), first in firsts(offsets, memories).items():
            if server not in self._pins:
                idle = self._buses.options.durable_idle
                self._pins[server] = Pin(self._buses.bus(server), durable, idle=idle)
            self._pins[server].move(name, first)
        for pin in former.values():
            pin.release()
        for server in [server for server in self._first_pins if server in memories]:
            self._first_pins.pop(server).release()

    def lost(self, server: str) -> None:
        """The connection is gone, and what it held."""
        self._pins.pop(server, None)
        self._first_pins.pop(server, None)

    def forget(self, server: str, classes: Iterable[str], durable: str) -> None:
        """Keep nothing of these classes under this name any more, if the bus can be asked."""
        try:
            pin = Pin(self._buses.bus(server), durable)
            for name in classes:
                pin.forget(name)
        except (BusConnectionError, RefusedError, PinError) as error:
            log.warning(
                "%s may still keep what is not read any more, under the name %r: %s",
                server,
                durable,
                error,
            )
