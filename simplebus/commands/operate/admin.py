"""`simplebus disconnect`, `reload` and `drain`: administration of a server over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simplebus.commands.operate.explain import printable
from simplebus.commands.operate.http_client import HTTP_URL, HttpClient, http_url_option
from simplebus.console.errors import fail

_URL_OPTION = http_url_option("HTTP address of the server (`serve --http-port`).")
_PERMISSIONS = "\n\nThe server needs users. The user must have no table `permissions`."
DISCONNECT_HELP = (
    "Close the connection of a session, by the HTTP port of the server.\n\n"
    "`simplebus explain` lists the sessions. A client may connect again; its unacknowledged "
    "messages are redelivered." + _PERMISSIONS + "\n\n\b\n"
    "  simplebus disconnect 4"
)
RELOAD_HELP = (
    "Make a server read its configuration again, as SIGHUP does, by its HTTP port.\n\n"
    "The result is in the log of the server." + _PERMISSIONS + "\n\n\b\n"
    "  simplebus reload"
)
DRAIN_HELP = (
    "Shut a server down, as SIGTERM does, by its HTTP port.\n\n"
    "The server finishes accepted work, and ends. A supervisor may start it again."
    + _PERMISSIONS
    + "\n\n\b\n"
    "  simplebus drain --url http://bus:8222"
)


def disconnect(
    session: Annotated[
        int,
        typer.Argument(min=0, metavar="SESSION", show_default=False, help="Number of the session."),
    ],
    url: Annotated[str, _URL_OPTION] = HTTP_URL,
) -> None:
    _request(url, "disconnect", {"session": session})


def reload(url: Annotated[str, _URL_OPTION] = HTTP_URL) -> None:
    _request(url, "reload", {})


def drain(url: Annotated[str, _URL_OPTION] = HTTP_URL) -> None:
    _request(url, "drain", {})


def _request(url: str, operation: str, body: dict[str, Any]) -> None:
    """Send a request of the HTTP API and print its result."""
    try:
        reply = HttpClient(url).request(f"/api/v1/{operation}", body)
    except (OSError, ValueError) as error:
        fail(str(error))
    typer.echo(printable(str(reply.get("result", "done"))))
