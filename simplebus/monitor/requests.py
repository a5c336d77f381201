"""HTTP requests and responses without I/O, and the handlers of paths.

Slow handlers yield so that other tasks can run. Only GET and HEAD without a body are supported.
Query values are bounded when they are read, and invalid ones raise BadRequestError.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import parse_qsl, unquote

import msgspec

from simplebus.monitor.snapshot import Health

METHODS = ("GET", "HEAD")
PUBLIC_PATHS = ("/healthz", "/healthz/live", "/healthz/ready")
"""Paths that need no authentication: health checks."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_QUERY_FIELDS_MAX = 32


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    """The Accept header; empty for any format."""

    @classmethod
    def parse(cls, target: str, accept: str = "") -> Request:
        """Parse a request target such as "/connz?limit=10". Raises BadRequestError."""
        path, _, query = target.partition("?")
        try:
            fields = parse_qsl(query, keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX)
        except ValueError:
            raise BadRequestError(
                f"expected at most {_QUERY_FIELDS_MAX} fields in the query, got more"
            ) from None
        return cls(unquote(path, errors="replace"), dict(fields), accept)

    def get_int(self, name: str, default: int, *, maximum: int) -> int:
        """Return an integer of the query, at most `maximum`. Raises BadRequestError."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadRequestError(f"expected {name} to be a whole number, got {text[:40]!r}")
        return min(int(text), maximum)

    def get_flag(self, name: str) -> bool:
        """Return True if the query contains the name, unless its value is 0 or false."""
        return self.query.get(name, "0").lower() not in ("0", "false")


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response."""

    body: bytes
    content_type: str = JSON
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


class BadRequestError(Exception):
    """The request is invalid; the message says why."""


ResponseSteps: TypeAlias = Generator[None, None, Response]
RequestHandler: TypeAlias = Callable[[Request], ResponseSteps]


def json_response(value: object, *, status: int = 200) -> Response:
    """Return a response with `value` as JSON."""
    return Response(msgspec.json.encode(value), JSON, status)


def error_response(status: int, message: str) -> Response:
    """Return a response with an error message as JSON."""
    return json_response({"error": message}, status=status)


class Routes:
    """Request handlers by path."""

    def __init__(self, handlers: Mapping[str, RequestHandler]) -> None:
        self._handlers = dict(handlers)

    def handle(self, request: Request) -> ResponseSteps:
        """Answer a request in steps. Invalid requests get an error response."""
        handle = self._handlers.get(request.path)
        if handle is None:
            yield
            return error_response(
                404, f"there is no {request.path[:80]!r}; there is {self._known_paths()}"
            )
        try:
            return (yield from handle(request))
        except BadRequestError as error:
            return error_response(400, str(error))

    def _known_paths(self) -> str:
        return ", ".join(sorted(self._handlers))


def health_handlers(health: Callable[[], Health]) -> dict[str, RequestHandler]:
    """Return the health handlers.

    /healthz answers with the readiness, also as HTTP status; /healthz/live always answers.
    """

    def handle_ready(request: Request) -> ResponseSteps:
        yield
        health_now = health()
        body = {
            "status": health_now.status,
            "live": True,
            "ready": health_now.ready and not health_now.draining,
            "draining": health_now.draining,
        }
        if health_now.reason:
            body["why"] = health_now.reason
        return json_response(body, status=200 if health_now.status == "ok" else 503)

    def handle_live(request: Request) -> ResponseSteps:
        yield
        return json_response({"status": "ok", "live": True})

    return {"/healthz": handle_ready, "/healthz/ready": handle_ready, "/healthz/live": handle_live}
