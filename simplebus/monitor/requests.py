"""Questions that come over HTTP, and their answers: which path is answered by whom.

Rule 1: pure. An answer that takes long is made in pieces; others have their turn in between.
Rule 2: only GET and HEAD; no question has a body. What is asked for in a query is bounded where it
is read, and a value that makes no sense is answered with a sentence.
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
"""Health is everybody's: who asks for it may have no name."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
_QUERY_FIELDS_MAX = 32


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks for."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = ""
    """What forms of an answer are understood, as they were named; empty for any."""

    @classmethod
    def parse(cls, target: str, accept: str = "") -> Request:
        """From the target of a request, such as "/connz?limit=10". Raises BadRequestError."""
        path, _, query = target.partition("?")
        try:
            fields = parse_qsl(query, keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX)
        except ValueError:
            raise BadRequestError(
                f"a query has at most {_QUERY_FIELDS_MAX} fields, this one has more"
            ) from None
        return cls(unquote(path, errors="replace"), dict(fields), accept)

    def get_int(self, name: str, default: int, *, maximum: int) -> int:
        """A whole number of the query, no more than so much. Raises BadRequestError."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadRequestError(f"{name} is a whole number, got {text[:40]!r}")
        return min(int(text), maximum)

    def get_flag(self, name: str) -> bool:
        """Whether something is asked for: by 1, true, or the bare name."""
        return self.query.get(name, "0").lower() not in ("0", "false")


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered."""

    body: bytes
    content_type: str = JSON
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


class BadRequestError(Exception):
    """A question that makes no sense; the sentence says why."""


ResponseSteps: TypeAlias = Generator[None, None, Response]
RequestHandler: TypeAlias = Callable[[Request], ResponseSteps]


def json_response(value: object, *, status: int = 200) -> Response:
    """A value as an answer."""
    return Response(msgspec.json.encode(value), JSON, status)


def error_response(status: int, message: str) -> Response:
    """Why there is no answer."""
    return json_response({"error": message}, status=status)


class Routes:
    """The answers of one door, by their paths."""

    def __init__(self, handlers: Mapping[str, RequestHandler]) -> None:
        self._handlers = dict(handlers)

    def handle(self, request: Request) -> ResponseSteps:
        """What is answered, in pieces. Raises nothing that the question may cause."""
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
    """The answers about health: /healthz says whether work is taken, by its status too, and
    /healthz/live whether anybody is there."""

    def handle_ready(request: Request) -> ResponseSteps:
        yield
        health_now = health()
        body = {
            "status": health_now.status,
            "live": True,
            "ready": health_now.ready and not health_now.draining,
            "draining": health_now.draining,
        }
        if health_now.why:
            body["why"] = health_now.why
        return json_response(body, status=200 if health_now.status == "ok" else 503)

    def handle_live(request: Request) -> ResponseSteps:
        yield
        return json_response({"status": "ok", "live": True})

    return {"/healthz": handle_ready, "/healthz/ready": handle_ready, "/healthz/live": handle_live}
