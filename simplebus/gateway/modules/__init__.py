"""Modules that come with simplebus, by their short names.

logger      writes what it hears into the log
timer       says something every so many seconds
transform   says what it hears again, otherwise
tail        says each line that is written to a file
uplink      takes what it hears to another bus
"""

from __future__ import annotations

SHIPPED = {
    "logger": "simplebus.gateway.modules.logger:Logger",
    "tail": "simplebus.gateway.modules.tail:Tail",
    "timer": "simplebus.gateway.modules.timer:Timer",
    "transform": "simplebus.gateway.modules.transform:Transform",
    "uplink": "simplebus.gateway.modules.uplink:Uplink",
}
"""Where each of them is."""
