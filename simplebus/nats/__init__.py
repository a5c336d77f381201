"""The NATS text protocol over the same broker: pure, bytes in and bytes out (protocol/nats.md)."""
