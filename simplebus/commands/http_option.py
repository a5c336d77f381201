"""The option `--http` of bridges and gateways."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simplebus.config.parse import HOSTS, PORT_MAX, option, parse_digits


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
