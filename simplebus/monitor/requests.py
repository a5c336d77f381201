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

from simplebus.monitor.facts import Health

METHODS = ("GET", "HEAD")
OPEN_PATHS = ("/healthz", "/healthz/live", "/healthz/ready")
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
    def of(cls, target: str, accept: str = "") -> Request:
        """From the target of a request, such as "/connz?limit=10". Raises BadRequestError."""
        path, _, query = target.partition("?")
        try:
            fields = parse_qsl(query, keep_blank_values=True, max_num_fields=_QUERY_FIELDS_MAX)
        except ValueError:
            raise BadRequestError(
                f"a query has at most {_QUERY_FIELDS_MAX} fields, this one has more"
            ) from None
        return cls(unquote(path, errors="replace"), dict(fields), accept)

    def number(self, name: str, default: int, *, most: int) -> int:
        """A whole number of the query, no more than so much. Raises BadRequestError."""
        text = self.query.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadRequestError(f"{name} is a whole number, got {text[:40]!r}")
        return min(int(text), most)

    def flag(self, name: str) -> bool:
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


Answering: TypeAlias = Generator[None, None, Response]
Answer: TypeAlias = Callable[[Request], Answering]


def as_json(value: object, *, status: int = 200) -> Response:
    """A value as an answer."""
    return Response(msgspec.json.encode(value), JSON, status)


def problem(status: int, sentence: str) -> Response:
    """Why there is no answer."""
    return as_json({"error": sentence}, status=status)


class Routes:
    """The answers of one door, by their paths."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self._answers = dict(answers)

    def answer(self, request: Request) -> Answering:
        """What is answered, in pieces. Raises nothing that the question may cause."""
        answer = self._answers.get(request.path)
        if answer is None:
            yield
            return problem(404, f"there is no {request.path[:80]!r}; there is {self._known()}")
        try:
            return (yield from answer(request))
        except BadRequestError as error:
            return problem(400, str(error))

    def _known(self) -> str:
        return ", ".join(sorted(self._answers))


def health_answers(health: Callable[[], Health]) -> dict[str, Answer]:
    """The answers about health: /healthz says whether work is taken, by its status too, and
    /healthz/live whether anybody is there."""

    def ready(request: Request) -> Answering:
        yield
        now = health()
        said = {
            "status": now.status,
            "live": True,
            "ready": now.ready and not now.draining,
            "draining": now.draining,
        }
        if now.why:
            said["why"] = now.why
        return as_json(said, status=200 if now.status == "ok" else 503)

    def live(request: Request) -> Answering:
        yield
        return as_json({"status": "ok", "live": True})

    return {"/healthz": ready, "/healthz/ready": ready, "/healthz/live": live}
