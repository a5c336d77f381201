"""Eviction of unauthenticated connections when a listener is full.

Authenticated connections are never evicted. The oldest connection of a network with a large share
is evicted first; without such a network, the oldest one of all. All operations are O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from simplebus.core.errors import RemoteProtocolError

Disconnect = Callable[[RemoteProtocolError], object]
"""Closes a connection with an error as the reason."""
LARGE_NETWORK_FRACTION = 4
"""A network has a large share if it has more than 1/4 of the connections."""


class EvictableConnections:
    """Unauthenticated connections of one listener, each identified by its disconnect function."""

    def __init__(self) -> None:
        self._network_by_connection: OrderedDict[Disconnect, str] = OrderedDict()
        """Network of each connection, oldest connection first."""
        self._connections_by_network: dict[str, OrderedDict[Disconnect, None]] = {}
        """Connections of each network, oldest first. No network is empty."""
        self._networks_by_size: dict[int, dict[str, None]] = {}
        """Networks by their number of connections."""
        self._largest_size = 0
        """Connections of the largest network."""

    def __len__(self) -> int:
        return len(self._network_by_connection)

    def add(self, network: str, disconnect: Disconnect) -> None:
        """Add a connection from a network, as returned by `address_network`."""
        self._network_by_connection[disconnect] = network
        connections = self._connections_by_network.setdefault(network, OrderedDict())
        connections[disconnect] = None
        self._move_to_size(network, len(connections) - 1, len(connections))

    def discard(self, disconnect: Disconnect) -> None:
        """Remove a connection that is authenticated, closed or evicted."""
        if (network := self._network_by_connection.pop(disconnect, None)) is None:
            return
        connections = self._connections_by_network[network]
        del connections[disconnect]
        if not connections:
            del self._connections_by_network[network]
        self._move_to_size(network, len(connections) + 1, len(connections))

    def _move_to_size(self, network: str, before: int, now: int) -> None:
        if before:
            del self._networks_by_size[before][network]
            if not self._networks_by_size[before]:
                del self._networks_by_size[before]
        if now:
            self._networks_by_size.setdefault(now, {})[network] = None
        if now > self._largest_size or self._largest_size not in self._networks_by_size:
            self._largest_size = now  # A size changes by one.

    def evict_one(self, error: RemoteProtocolError) -> bool:
        """Disconnect one connection with `error`. Returns False if no connection can be evicted.

        Its socket is closed a moment later.
        """
        if not self._network_by_connection:
            return False
        disconnect = next(iter(self._network_by_connection))
        if self._largest_size * LARGE_NETWORK_FRACTION > len(self._network_by_connection):
            disconnect = next(
                iter(
                    self._connections_by_network[
                        next(iter(self._networks_by_size[self._largest_size]))
                    ]
                )
            )
        self.discard(disconnect)
        disconnect(error)
        return True
