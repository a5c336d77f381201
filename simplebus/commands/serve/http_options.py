"""Options of `serve` for the HTTP listener: health, metrics and the live page.

Heavy modules are imported when the command runs, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from simplebus.config.parse import HOSTS, option, parse_host, parse_port

HTTP_PORT = 8222
HTTP = "HTTP: health, metrics, the live page"
"""Heading of these options in the help."""

Port = Annotated[
    int | None,
    option(
        "--http-port",
        "TCP port for health, metrics and the live page. 0 picks a free port, which the ready line "
        "shows.",
        panel=HTTP,
        parser=parse_port,
        metavar="PORT",
        show_default=f"{HTTP_PORT}, or 0 with --port 0",
    ),
]
Hosts = Annotated[
    list[str] | None,
    option(
        "--http-host",
        "Address or host name to listen on for HTTP, independent of --host. Repeat the option for "
        "more addresses.",
        panel=HTTP,
        parser=parse_host,
        metavar="ADDRESS",
        show_default="127.0.0.1 and ::1",
    ),
]
Names = Annotated[
    list[str] | None,
    option(
        "--http-name",
        "Further host name that HTTP requests over loopback may use, such as the name of a proxy "
        "on this machine. Repeat the option for more names. Without configured users, loopback "
        "requests must name an IP address, localhost, this machine's name or one of these, so that "
        "web pages cannot read the port.",
        panel=HTTP,
        metavar="NAME",
        show_default=False,
    ),
]
Closed = Annotated[bool, option("--no-http", "Do not open the HTTP port.", panel=HTTP)]


def parse_address(text: str | tuple[str, int]) -> tuple[str, int]:
    """Return the host and port of "8223" or "0.0.0.0:8223". Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise typer.BadParameter(f"{text!r} is no port, such as 8223, and no 0.0.0.0:8223")
    return host.strip("[]") or HOSTS[0], int(port)


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


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Settings of the HTTP listener."""

    port: int | None
    """None if the listener is closed."""
    hosts: tuple[str, ...] = HOSTS
    names: tuple[str, ...] = ()


def http_options(
    given: Collection[str],
    *,
    port: int,
    http_port: int | None,
    http_host: list[str] | None,
    http_name: list[str] | None = None,
    no_http: bool,
    **_: Any,
) -> HttpOptions:
    """Return the settings of the HTTP listener.

    Args:
        given: Names of the options on the command line.

    Raises:
        ValueError: If the options contradict each other.
    """
    if no_http:
        for name in sorted(given):
            if name.startswith("http_"):
                raise ValueError(f"--no-http and --{name.replace('_', '-')} contradict each other")
        return HttpOptions(None)
    if http_port is None:
        http_port = HTTP_PORT if port else 0
    return HttpOptions(http_port, tuple(dict.fromkeys(http_host or HOSTS)), tuple(http_name or ()))
