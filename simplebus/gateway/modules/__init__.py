"""Modules that come with simplebus, by their short names.

logger           logs received messages
timer            publishes a message periodically
transform        changes properties of messages
tail             publishes each line that is written to a file
uplink           sends messages to another bus or a NATS server
uplink_settings  settings of the uplink
bus_writer       writes the uplink's messages to its local bus

May import the gateway's own modules, bridge, memory, client, config, logs and core.
"""

from __future__ import annotations

SHIPPED = {
    "logger": "simplebus.gateway.modules.logger:Logger",
    "tail": "simplebus.gateway.modules.tail:Tail",
    "timer": "simplebus.gateway.modules.timer:Timer",
    "transform": "simplebus.gateway.modules.transform:Transform",
    "uplink": "simplebus.gateway.modules.uplink:Uplink",
}
"""Entry points by short name."""
