"""The live page: three files of ours, as they lie beside this one.

Rule 1: the page is the same for every program: it is made of facts. It loads nothing from anywhere
else, and nothing that a name says can become part of it but as text.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from simplebus.monitor.requests import Answer, Answering, Request, Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _read(name: str) -> bytes:
    return resources.files("simplebus.monitor").joinpath("files", name).read_bytes()


def answers() -> dict[str, Answer]:
    """The page's paths, and what is answered."""
    return {path: _answer_with(name, kind) for path, (name, kind) in _FILES.items()}


def _answer_with(name: str, kind: str) -> Answer:
    def answer(request: Request) -> Answering:
        yield
        return Response(_read(name), kind, headers=(("Content-Security-Policy", _POLICY),))

    return answer
