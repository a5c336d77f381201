"""Fixtures shared with the packages that use connections."""

from tests.jetstream.conftest import jetstream_server
from tests.server.conftest import authority, own

__all__ = ["authority", "jetstream_server", "own"]
