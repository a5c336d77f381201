"""The options of the door for operators.

Rule 1: nothing heavy is imported here, so that help is instant.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from simplebus.config.parse import HOSTS, option, parse_host, parse_port

HTTP_PORT = 8222
HTTP = "HTTP: health, metrics, the live page"
"""The heading of these options in the help."""

Port = Annotated[
    int | None,
    option(
        "--http-port",
        "The TCP port for health, metrics and the live page. 0 picks a free one; the ready line "
        "tells which.",
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
        "An address or name to listen on there, whatever --host says; give it again for more than "
        "one.",
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
        "A name by which that port is called over loopback, as a proxy on this machine may do; "
        "give it again for more. Where it asks nobody who it is, it answers there to addresses, "
        "localhost, this machine's name and these only, so that no web page can read it.",
        panel=HTTP,
        metavar="NAME",
        show_default=False,
    ),
]
Closed = Annotated[bool, option("--no-http", "Keep that port closed.", panel=HTTP)]


def parse_address(text: str | tuple[str, int]) -> tuple[str, int]:
    """Where to listen, from "8223" or "0.0.0.0:8223". Raises typer.BadParameter."""
    if isinstance(text, tuple):
        return text
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise typer.BadParameter(f"{text!r} is no port, such as 8223, and no 0.0.0.0:8223")
    return host.strip("[]") or HOSTS[0], int(port)


At = Annotated[
    Any,
    option(
        "--http",
        "Answer there, over HTTP, how it is doing: health, metrics, a live page. A port, or an "
        "address and a port; a port alone is for programs on this machine. 0 picks a free one.",
        parser=parse_address,
        metavar="[ADDRESS:]PORT",
        show_default="nowhere",
    ),
]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """What the options say."""

    port: int | None
    """None for a closed door."""
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
    """What the options amount to. `given` are the names of those that stand on the command line.

    Raises ValueError when they contradict each other.
    """
    if no_http:
        for name in sorted(given):
            if name.startswith("http_"):
                raise ValueError(f"--no-http closes the door that --{name.replace('_', '-')} opens")
        return HttpOptions(None)
    if http_port is None:
        http_port = HTTP_PORT if port else 0
    return HttpOptions(http_port, tuple(dict.fromkeys(http_host or HOSTS)), tuple(http_name or ()))
