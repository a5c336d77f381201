"""simplebus: a message bus that acknowledges every message.
"""
from simplebus.client.bus import Bus, connect
