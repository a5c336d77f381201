"""A JetStream server that is shared by the tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.jetstream.nats_servers import NatsServer, nats_server


@pytest.fixture(scope="session")
def jetstream_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("jetstream")) as server:
        yield server
