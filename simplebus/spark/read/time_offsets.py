"""Resolution of times to offsets, by asking the buses.

The result may change as messages arrive.
"""

from __future__ import annotations

from simplebus.spark.connections import SourceConnections
from simplebus.spark.read.offsets import OffsetSpec, TimestampSpec


def resolve_times(wanted: OffsetSpec | TimestampSpec, connections: SourceConnections) -> OffsetSpec:
    """Replace times by offsets. Call it before fetching extents, so that the offsets lie within
    them.

    Raises OffsetError, ClassMissingError, BusConnectionError.
    """
    if not isinstance(wanted, TimestampSpec):
        return wanted
    options = connections.options
    wanted.check_names(options.servers, options.subscribe)
    found: dict[str, dict[str, int]] = {}
    for server in options.servers:
        times = {name: wanted.time_for(server, name) for name in options.subscribe}
        at = connections[server].find_first_since(times)
        found[server] = {
            name: wanted.offset_past_end(server, name) if sequence is None else sequence
            for name, sequence in at.items()
        }
    return found


def option_name(wanted: OffsetSpec | TimestampSpec, otherwise: str) -> str:
    """Return the name of the option that set `wanted`; `otherwise` for plain offsets."""
    return wanted.option if isinstance(wanted, TimestampSpec) else otherwise
