"""Resolution of times to offsets, by asking the buses.

The result may change as messages arrive.
"""

from __future__ import annotations

from simplebus.spark.connections import SourceConnections
from simplebus.spark.read.offsets import OffsetSpec, TimestampSpec


def resolve_times(spec: OffsetSpec | TimestampSpec, connections: SourceConnections) -> OffsetSpec:
    """Replace times by offsets. Call it before fetching extents, so that the offsets lie within
    them.

    Raises OffsetError, ClassMissingError, BusConnectionError.
    """
    if not isinstance(spec, TimestampSpec):
        return spec
    options = connections.options
    spec.check_names(options.servers, options.subscribe)
    found: dict[str, dict[str, int]] = {}
    for server in options.servers:
        times = {name: spec.time_for(server, name) for name in options.subscribe}
        at = connections[server].find_first_since(times)
        found[server] = {
            name: spec.offset_past_end(server, name) if sequence is None else sequence
            for name, sequence in at.items()
        }
    return found


def option_name(spec: OffsetSpec | TimestampSpec, default: str) -> str:
    """Return the name of the option that set `spec`; `default` for plain offsets."""
    return spec.option if isinstance(spec, TimestampSpec) else default
