"""simplebus: a message bus that acknowledges every message."""
