"""Administration over HTTP: checks of requests, and their log.

The operations are in `api_operations`, which is loaded at the first request because that takes
long. Every request except the list of classes needs a user, who must send credentials or a
certificate: an address alone does not count. A request that changes something must have a header
that a web page of another site cannot send, and is logged.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from urllib.parse import urlsplit

import msgspec
import trio

from simplebus.core.errors import BusError, Reason, RefusedError
from simplebus.core.users.users import User
from simplebus.logs.event_logger import EventLogger
from simplebus.monitor.requests import JSON, Request, Response, error_response, json_response
from simplebus.server.http.api_routes import PREFIX, ApiRoute
from simplebus.server.http.api_types import ApiError, ApiParameters, ApiResult
from simplebus.server.http.auth import HttpAuth
from simplebus.server.server import Server

log = EventLogger("simplebus.server")

GUARD_HEADER = "x-simplebus-request"
"""Header of every request that changes something. Browsers send it only within one site."""
BODY_BYTES_MAX = 16 * 1024
REQUEST_SECONDS_MAX = 30.0
"""Time limit of a request, for example if a class has no space for a requeued message."""

_STATUSES = {Reason.UNAUTHORIZED: 403, Reason.UNKNOWN_CLASS: 404, Reason.UNKNOWN_SESSION: 404}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """An HTTP request below `PREFIX`."""

    method: str
    request: Request
    headers: Mapping[bytes, bytes]
    peer: str
    certificate_names: Sequence[str]
    read_body: Callable[[], Awaitable[bytes]]
    """Reads the body, of at most `BODY_BYTES_MAX` bytes."""

    def get_header(self, name: str) -> str:
        """Return a header, or an empty text."""
        return self.headers.get(name.encode(), b"").decode("latin-1")


class AdminApi:
    """Answers requests below `PREFIX`."""

    def __init__(self, server: Server, auth: HttpAuth, version: str) -> None:
        self._server = server
        self._auth = auth
        self._version = version
        self._description: Response | None = None
        self._user_locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        """Requests of one user run one after the other, because a user is a single publisher."""

    async def answer(self, request: ApiRequest) -> Response:
        """Return the response to a request."""
        path = request.request.path
        is_description = path == PREFIX + "openapi.json"
        user = await self._auth.find_user(
            request.peer,
            request.get_header("authorization"),
            request.certificate_names,
            accepts_address=is_description,
        )
        if isinstance(user, Response):
            return user
        operations = await trio.to_thread.run_sync(_load_operations)
        if is_description:
            return await self._get_description(operations)
        route = operations.ROUTES.by_path.get(path)
        if route is None:
            return error_response(404, f"unknown path; {PREFIX}openapi.json lists all")
        if request.method != route.method:
            error = error_response(405, f"expected {route.method}")
            return Response(error.body, status=405, headers=(("Allow", route.method),))
        if user is None and route.needs_user:
            return error_response(403, "this server has no users, expected one with --users")
        class_name, outcome = "", "interrupted"
        try:
            parameters = await self._read_parameters(request, route)
            class_name = getattr(parameters, "class_", "")
            result = await self._run(operations, route, parameters, user, request.peer)
            response, outcome = json_response(result), result.describe()
        except (BusError, ValueError, ExceptionGroup) as error:
            status, outcome = _describe_error(error)
            response = error_response(status, outcome)
        finally:
            if route.changes:
                log.info(
                    "admin.requested",
                    "user {user!r} requested {action} of {class_name!r:.80} by HTTP: {outcome}",
                    user="" if user is None else user.name,
                    action=route.operation,
                    class_name=class_name,
                    outcome=outcome,
                    peer=request.peer,
                    is_unlimited=True,
                )
        return response

    async def _get_description(self, operations: ModuleType) -> Response:
        if self._description is None:  # Building it takes tens of milliseconds.
            describe = operations.ROUTES.describe
            description = await trio.to_thread.run_sync(describe, self._version)
            self._description = json_response(description)
        return self._description

    async def _read_parameters(self, request: ApiRequest, route: ApiRoute) -> ApiParameters:
        """Return the query or the body. Raises ApiError."""
        try:
            if not route.changes:
                return msgspec.convert(dict(request.request.query), route.parameters, strict=False)
            _check_origin(request)
            return msgspec.json.decode(await request.read_body() or b"{}", type=route.parameters)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, str(error)) from None

    async def _run(
        self,
        module: ModuleType,
        route: ApiRoute,
        parameters: ApiParameters,
        user: User | None,
        peer: str,
    ) -> ApiResult:
        """Return the result of an operation. Raises BusError."""
        users = self._server.broker.users
        grants = None if user is None or users is None else users.get_grants(user)
        if route.needs_all_rights and grants is not None:
            assert user is not None
            raise ApiError(
                403, f"user {user.name!r} has a permissions table, expected a user without one"
            )
        operations = module.AdminOperations(self._server, user, grants, peer)
        async with self._user_locks["" if user is None else user.name]:
            with trio.move_on_after(REQUEST_SECONDS_MAX):
                result: ApiResult = await getattr(operations, route.operation)(parameters)
                return result
        raise ApiError(504, f"the request did not finish within {REQUEST_SECONDS_MAX:g} s")


def _load_operations() -> ModuleType:
    return importlib.import_module("simplebus.server.http.api_operations")


def _check_origin(request: ApiRequest) -> None:
    """Check that the request is not from a web page of another site. Raises ApiError."""
    if not request.get_header(GUARD_HEADER):
        raise ApiError(403, "expected the header X-Simplebus-Request")
    if request.get_header("content-type").partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f"expected Content-Type: {JSON}")
    origin = request.get_header("origin")
    if origin and urlsplit(origin).netloc.lower() != request.get_header("host").lower():
        raise ApiError(403, "expected an Origin that is equal to Host")
    if request.get_header("sec-fetch-site") not in ("", "same-origin", "none"):
        raise ApiError(403, "expected a request of the same site")


def _describe_error(error: Exception) -> tuple[int, str]:
    """Return status and text of an error. Raises groups without an expected error."""
    while isinstance(error, ExceptionGroup):
        first = error.exceptions[0]
        if not isinstance(first, BusError | ValueError | ExceptionGroup):
            raise error
        error = first
    if isinstance(error, ApiError):
        return error.status, str(error)
    if isinstance(error, RefusedError):
        return _STATUSES.get(Reason(error.code), 409), str(error)
    return 400 if isinstance(error, ValueError) else 503, str(error)
