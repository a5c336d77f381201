"""Fixtures shared with the packages that use connections."""

from tests.jetstream.conftest import jetstream_server
from tests.server.conftest import authority, server_certificate

__all__ = ["authority", "jetstream_server", "server_certificate"]
