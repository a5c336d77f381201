"""The live page: static files next to this module.

The page is the same for every program and shows the data of /facts. It loads nothing from other
hosts, and names from clients appear in it as text only.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from simplebus.monitor.requests import Request, RequestHandler, Response, ResponseSteps

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _read(name: str) -> bytes:
    return resources.files("simplebus.monitor").joinpath("files", name).read_bytes()


def build_handlers() -> dict[str, RequestHandler]:
    """Return the handlers of the page's files by path."""
    return {
        path: _create_file_handler(name, content_type)
        for path, (name, content_type) in _FILES.items()
    }


def _create_file_handler(name: str, content_type: str) -> RequestHandler:
    def handle(request: Request) -> ResponseSteps:
        yield
        return Response(
            _read(name),
            content_type,
            headers=(("Content-Security-Policy", _CONTENT_SECURITY_POLICY),),
        )

    return handle
