"""HTTP client of commands that use the HTTP listener of a server, bridge or gateway."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import typer

from simplebus.commands.operate.explain import printable

if TYPE_CHECKING:
    import ssl
    from urllib.error import HTTPError
    from urllib.request import OpenerDirector

    from simplebus.client.credentials import Access

HTTP_URL = "http://127.0.0.1:8222"
_TIMEOUT_SECONDS = 5.0
_ERROR_BYTES_MAX = 4096
_REPLY_BYTES_MAX = 16 * 1024 * 1024


def http_url_option(help: str) -> Any:
    """Return the option --url of a command that uses an HTTP listener."""
    return typer.Option(
        "--url", metavar="URL", envvar="SIMPLEBUS_HTTP_URL", show_envvar=False, help=help
    )


class HttpClient:
    """HTTP client with the credentials of the environment. Follows no redirects."""

    def __init__(self, url: str) -> None:
        """Raises ValueError for an invalid URL, OSError for an unusable certificate."""
        from simplebus.client.credentials import Access

        self._url = _check_url(url if "://" in url else f"http://{url}")
        access = Access.from_environment()
        self._headers = _credentials(access)
        self._opener = _create_direct_opener(
            access.tls() if self._url.startswith("https://") else None
        )

    def request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object of a reply. Raises OSError with an error message.

        Args:
            path: The path, such as "/facts".
            body: Body of a POST request; None for GET.
        """
        import http.client
        import ssl
        import urllib.error
        import urllib.request

        request = urllib.request.Request(f"{self._url}{path}", headers=self._headers)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
            request.add_header("X-Simplebus-Request", "1")
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as response:
                reply = json.loads(response.read(_REPLY_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                reason = _describe_http_error(error)
            raise OSError(f"{self._url} replied {error.code} {reason}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                raise OSError(
                    f"{self._url} has an untrusted certificate ({error.reason.verify_message}): "
                    "name its authority with --tls-ca"
                ) from None
            if isinstance(error.reason, ssl.SSLError):
                raise OSError(
                    f"{self._url}: the TLS handshake failed ({error.reason.reason}); without TLS, "
                    "the address begins with http://"
                ) from None
            raise OSError(f"{self._url} does not answer: {error.reason}") from None
        except http.client.RemoteDisconnected:
            raise OSError(
                f"{self._url} closed the connection without an answer; use https:// for TLS"
            ) from None
        except (http.client.HTTPException, ValueError, RecursionError):
            raise self.not_simplebus_error() from None
        except OSError as error:  # While the answer is read.
            raise OSError(f"{self._url} does not answer: {error}") from None
        if not isinstance(reply, dict):
            raise self.not_simplebus_error()
        return reply

    def not_simplebus_error(self) -> OSError:
        """Return the error for a reply that is not of simplebus."""
        return OSError(
            f"{self._url} is not an HTTP port of simplebus; expected port 8222 or the one of "
            "--http-port"
        )


def _describe_http_error(error: HTTPError) -> str:
    """Return reason and text of an error response."""
    reason, text = printable(error.reason), ""
    content_type = error.headers.get_content_type()
    data = error.read(_ERROR_BYTES_MAX)
    if content_type == "text/plain":  # Of a port for bus clients.
        text = data.decode("utf-8", "replace")
    elif content_type == "application/json":
        with suppress(ValueError, RecursionError, KeyError, TypeError):
            text = str(json.loads(data)["error"])
    text = printable(text.strip())
    return f"{reason}: {text}" if text else reason


def _create_direct_opener(tls: ssl.SSLContext | None) -> OpenerDirector:
    """Return an opener without proxies and redirects, so that credentials go to the URL only."""
    import urllib.request  # Slow to import, and not needed for --help.

    class NoRedirectHandler(urllib.request.HTTPRedirectHandler):
        """Handler that follows no redirect."""

        def redirect_request(self, *_: Any) -> None:
            return None

    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=tls),
        NoRedirectHandler(),
    )


def _check_url(url: str) -> str:
    """Return a valid URL. Raises ValueError, without the secrets of the URL."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.username is not None:
        raise ValueError(
            "the URL must not contain credentials: use --user, SIMPLEBUS_USER and "
            "SIMPLEBUS_PASSWORD"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http://HOST:PORT, got {url!r}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"expected a port from 1 to 65535, got {url!r}") from None
    return url.rstrip("/")


def _credentials(access: Access) -> dict[str, str]:
    if access.token:
        return {"Authorization": f"Bearer {access.token}"}
    if not access.user:
        return {}
    encoded = base64.b64encode(f"{access.user}:{access.password}".encode()).decode()
    return {"Authorization": f"Basic {encoded}"}
