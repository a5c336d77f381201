"""From times to offsets: what a user says in milliseconds, the buses know in sequences.

Rule 1: only asks. What is said is read by `options`, what it means is known to `offsets`.
Rule 2: the same question may get another answer later: what was expected to come has come.
"""

from __future__ import annotations

from simplebus.spark.connections import Buses
from simplebus.spark.read.offsets import Times, Wanted


def sought(wanted: Wanted | Times, buses: Buses) -> Wanted:
    """The same without times. To be asked before what the buses hold, which has it in it then.

    Raises OffsetError, ClassMissingError, BusConnectionError.
    """
    if not isinstance(wanted, Times):
        return wanted
    options = buses.options
    wanted.check(options.servers, options.subscribe)
    found: dict[str, dict[str, int]] = {}
    for server in options.servers:
        times = {name: wanted.of(server, name) for name in options.subscribe}
        at = buses[server].first_since(times)
        found[server] = {
            name: wanted.missed(server, name) if sequence is None else sequence
            for name, sequence in at.items()
        }
    return found


def option_of(wanted: Wanted | Times, otherwise: str) -> str:
    """Which option said so."""
    return wanted.option if isinstance(wanted, Times) else otherwise
