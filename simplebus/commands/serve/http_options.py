"""Port of the server's HTTP listener, and the option `--http` of bridges and gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import HOSTS, PORT_MAX, option, parse_digits
from simplebus.config.server_schema import SETTINGS

if TYPE_CHECKING:
    from simplebus.config.configuration import Configuration

_HTTP_PORT = 8222


def http_port(configuration: Configuration) -> int | None:
    """Return the port of the HTTP listener; None if it is closed.

    Raises:
        ValueError: If options contradict each other.
    """
    config = configuration.config
    if config.http.no_http:
        for name in configuration.names_on_command_line:
            if name.startswith("http_"):
                raise ValueError(f"--no-http and {SETTINGS[name].flag} contradict each other")
        return None
    port = config.http.http_port
    return (_HTTP_PORT if config.general.port else 0) if port is None else port


def parse_address(text: str | tuple[str, int]) -> tuple[str, int]:
    """Return the host and port of "8223" or "0.0.0.0:8223". Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    host, _, port = text.rpartition(":")
    if (number := parse_digits(port, PORT_MAX)) is None:
        raise typer.BadParameter(
            f"{text!r} is not an address; expected a port such as 8223, or 0.0.0.0:8223"
        )
    return host.strip("[]") or HOSTS[0], number


HttpAddress = Annotated[
    Any,
    option(
        "--http",
        "Serve health, metrics and a live page over HTTP on this port, or address and port. A port "
        "alone is reachable from this machine only. 0 picks a free port.",
        parser=parse_address,
        metavar="[ADDRESS:]PORT",
        show_default="no HTTP",
    ),
]
