"""Administration over HTTP: routes, checks of requests, and the OpenAPI description.

The table `ROUTES` is the source of both. Every request except the list of classes needs a user, who
must send credentials or a certificate: an address alone does not count. A request that changes
something must have a header that a web page of another site cannot send, and is logged.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import trio
from msgspec import Meta

from simplebus.core.errors import BusError, Reason, RefusedError
from simplebus.core.limits import CLASS_ID_MAX, SEQUENCE_MAX
from simplebus.core.protocol.inquiry import ClassOverview
from simplebus.core.users.users import User
from simplebus.logs.event_logger import EventLogger
from simplebus.monitor.requests import (
    JSON,
    Request,
    Response,
    error_response,
    json_response,
)
from simplebus.server.http.auth import HttpAuth
from simplebus.server.server import Server

log = EventLogger("simplebus.server")

PREFIX = "/api/v1/"
GUARD_HEADER = "x-simplebus-request"
"""Header of every request that changes something. Browsers send it only within one site."""
BODY_BYTES_MAX = 16 * 1024
REQUEST_SECONDS_MAX = 30.0
"""Time limit of a request, for example if a class has no space for a requeued message."""
PEEKED_MESSAGES_MAX = 100
PEEKED_BYTES_MAX = 64 * 1024
"""Bytes of one payload that a reply contains."""
HANDLED_LETTERS_MAX = 1000
"""Dead letters that one request requeues or drops."""

_STATUSES = {Reason.UNAUTHORIZED: 403, Reason.UNKNOWN_CLASS: 404, Reason.UNKNOWN_SESSION: 404}
_OPERATIONS_MODULE = "simplebus.server.http.api_operations"

ClassReference = Annotated[str, Meta(min_length=1, max_length=256)]
Sequence_ = Annotated[int, Meta(ge=0, le=SEQUENCE_MAX)]
PayloadFormat = Literal["json", "text", "hex"]


class ApiError(BusError):
    """A request cannot be answered; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class NoParameters(_Parameters, frozen=True):
    """Parameters of a request without any."""


class PeekParameters(_Parameters, frozen=True):
    """Parameters of a request for messages."""

    class_: ClassReference = msgspec.field(name="class")
    first: Sequence_ = 0
    """First sequence."""
    count: Annotated[int, Meta(ge=1, le=PEEKED_MESSAGES_MAX)] = 20
    bytes: Annotated[int, Meta(ge=0, le=PEEKED_BYTES_MAX)] = 1024
    """Bytes of each payload."""
    format: PayloadFormat = "json"
    """Preferred format. A payload that is not JSON is text, one that is not UTF-8 hexadecimal."""


class LettersParameters(PeekParameters, frozen=True):
    """Parameters of a request for dead letters."""

    reason: str | None = None
    subscription: str | None = None


class LetterSelection(_Parameters, frozen=True):
    """Selects dead letters; `all` or another criterion is required."""

    class_: ClassReference = msgspec.field(name="class")
    sequences: Annotated[list[Sequence_], Meta(max_length=HANDLED_LETTERS_MAX)] = []
    reason: str | None = None
    subscription: str | None = None
    all: bool = False
    first: Sequence_ = 0


class PurgeParameters(_Parameters, frozen=True):
    """Parameters of a purge of the sequences first..last-1."""

    class_: ClassReference = msgspec.field(name="class")
    last: Sequence_
    first: Sequence_ = 0


class ForgetParameters(_Parameters, frozen=True):
    """Durable to remove."""

    class_: ClassReference = msgspec.field(name="class")
    durable: Annotated[str, Meta(min_length=1, max_length=256)]


class DisconnectParameters(_Parameters, frozen=True):
    """Session to disconnect."""

    session: Annotated[int, Meta(ge=0)]


class ClassList(msgspec.Struct, frozen=True):
    """Classes of the bus."""

    classes: list[ClassOverview]
    left_out: int


class PeekedMessage(msgspec.Struct, frozen=True):
    """One stored message, with the beginning of its payload."""

    sequence: int
    channel: str
    key: str
    headers: list[tuple[str, str]]
    payload: Any
    format: PayloadFormat
    payload_bytes: int
    """Size of the whole payload."""
    is_truncated: bool


class MessageList(msgspec.Struct, frozen=True):
    """Messages of a class, oldest first."""

    class_id: int
    class_: str = msgspec.field(name="class")
    messages: list[PeekedMessage]
    next: int | None
    """First sequence of the next request; None at the end."""


class PeekedLetter(PeekedMessage, frozen=True):
    """One dead letter, with the headers of its publisher."""

    reason: str
    source_class: str
    source_sequence: str
    attempts: str
    subscription: str
    time: str
    """Seconds since 1970."""
    error: str
    """Error from the last nack; empty if there was none."""


class LetterList(msgspec.Struct, frozen=True):
    """Dead letters of a class, oldest first."""

    class_id: int
    class_: str = msgspec.field(name="class")
    letters: list[PeekedLetter]
    next: int | None
    """First sequence of the next request; None at the end."""


class RefusedLetter(msgspec.Struct, frozen=True):
    """Dead letter that was not requeued."""

    sequence: int
    error: str


class LettersResult(msgspec.Struct, frozen=True):
    """Result for selected dead letters."""

    count: int
    """Dead letters that were requeued or dropped."""
    refused: list[RefusedLetter] = []
    next: int | None = None
    """`first` of the next request, if there may be more dead letters; None at the end."""


class CountResult(msgspec.Struct, frozen=True):
    """Result of a purge."""

    count: int


class ActionResult(msgspec.Struct, frozen=True):
    """Result of an action without a count."""

    result: str


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every reply with a status of 400 or more."""

    error: str


@dataclass(frozen=True, slots=True)
class Route:
    """One request of the API."""

    path: str
    operation: str
    """Name of the function in `api_operations`, and `operationId`."""
    summary: str
    permission: str
    parameters: type[_Parameters]
    result: type[msgspec.Struct]
    changes: bool = True
    """True for POST with a body, False for GET with a query."""
    needs_user: bool = True
    needs_all_rights: bool = False
    """True if a user with a permissions table is refused."""

    @property
    def method(self) -> str:
        return "POST" if self.changes else "GET"


_ALL_RIGHTS = "no permissions table"

ROUTES = (
    Route(
        path="classes",
        operation="list_classes",
        summary="List classes.",
        permission="inquire",
        parameters=NoParameters,
        result=ClassList,
        changes=False,
        needs_user=False,
    ),
    Route(
        path="messages",
        operation="peek_messages",
        summary="Show stored messages.",
        permission="fetch, or subscribe to the class",
        parameters=PeekParameters,
        result=MessageList,
        changes=False,
    ),
    Route(
        path="dead-letters",
        operation="list_letters",
        summary="Show dead letters.",
        permission="inquire, and as for messages",
        parameters=LettersParameters,
        result=LetterList,
        changes=False,
    ),
    Route(
        path="dead-letters/requeue",
        operation="requeue_letters",
        summary="Publish dead letters again.",
        permission="as for dead letters, purge, and publish to their original class",
        parameters=LetterSelection,
        result=LettersResult,
    ),
    Route(
        path="dead-letters/drop",
        operation="drop_letters",
        summary="Discard dead letters.",
        permission="as for dead letters, and purge",
        parameters=LetterSelection,
        result=LettersResult,
    ),
    Route(
        path="purge",
        operation="purge_messages",
        summary="Discard stored messages.",
        permission="purge",
        parameters=PurgeParameters,
        result=CountResult,
    ),
    Route(
        path="forget",
        operation="forget_durable",
        summary="Remove an idle durable.",
        permission="inquire, subscribe, and configure for a durable of another user",
        parameters=ForgetParameters,
        result=ActionResult,
    ),
    Route(
        path="disconnect",
        operation="disconnect_session",
        summary="Close the connection of a session.",
        permission=_ALL_RIGHTS,
        parameters=DisconnectParameters,
        result=ActionResult,
        needs_all_rights=True,
    ),
    Route(
        path="reload",
        operation="start_reload",
        summary="Read the configuration again, as SIGHUP.",
        permission=_ALL_RIGHTS,
        parameters=NoParameters,
        result=ActionResult,
        needs_all_rights=True,
    ),
    Route(
        path="drain",
        operation="start_drain",
        summary="Shut the server down, as SIGTERM.",
        permission=_ALL_RIGHTS,
        parameters=NoParameters,
        result=ActionResult,
        needs_all_rights=True,
    ),
)


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
        self._routes = {PREFIX + route.path: route for route in ROUTES}
        self._version = version
        self._description: Response | None = None
        self._user_locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)
        """One request of each user runs at a time, because it is one publisher."""

    async def answer(self, request: ApiRequest) -> Response:
        """Return the response to a request."""
        if request.request.path == PREFIX + "openapi.json":
            user = await self._auth.find_user(
                request.peer, request.get_header("authorization"), request.certificate_names
            )
            return user if isinstance(user, Response) else await self._get_description()
        route = self._routes.get(request.request.path)
        if route is None:
            return error_response(404, f"unknown path; {PREFIX}openapi.json lists all")
        if request.method != route.method:
            error = error_response(405, f"expected {route.method}")
            return Response(error.body, status=405, headers=(("Allow", route.method),))
        user = await self._auth.find_user(
            request.peer,
            request.get_header("authorization"),
            request.certificate_names,
            accepts_address=False,
        )
        if isinstance(user, Response):
            return user
        if user is None and route.needs_user:
            return error_response(403, "this server has no users, expected one with --users")
        class_name, outcome = "", "interrupted"
        try:
            parameters = await self._read_parameters(request, route)
            class_name = getattr(parameters, "class_", "")
            result = await self._run(route, parameters, user, request.peer)
            response, outcome = json_response(result), _describe_result(result)
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

    async def _get_description(self) -> Response:
        if self._description is None:  # Building it takes tens of milliseconds.
            description = await trio.to_thread.run_sync(describe_api, self._version)
            self._description = json_response(description)
        return self._description

    async def _read_parameters(self, request: ApiRequest, route: Route) -> _Parameters:
        """Return the query or the body. Raises ApiError."""
        try:
            if not route.changes:
                return msgspec.convert(dict(request.request.query), route.parameters, strict=False)
            _check_origin(request)
            return msgspec.json.decode(await request.read_body() or b"{}", type=route.parameters)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, str(error)) from None

    async def _run(
        self, route: Route, parameters: _Parameters, user: User | None, peer: str
    ) -> msgspec.Struct:
        """Return the result of an operation. Raises BusError."""
        users = self._server.broker.users
        grants = None if user is None or users is None else users.get_grants(user)
        if route.needs_all_rights and grants is not None:
            assert user is not None
            raise ApiError(
                403, f"user {user.name!r} has a permissions table, expected a user without one"
            )
        # The client is loaded at the first request, in a thread because that takes long.
        module = await trio.to_thread.run_sync(importlib.import_module, _OPERATIONS_MODULE)
        operations = module.AdminOperations(self._server, user, grants, peer)
        async with self._user_locks["" if user is None else user.name]:
            with trio.move_on_after(REQUEST_SECONDS_MAX):
                result: msgspec.Struct = await getattr(operations, route.operation)(parameters)
                return result
        raise ApiError(504, f"not finished after {REQUEST_SECONDS_MAX:g} s")


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


def _describe_result(result: msgspec.Struct) -> str:
    match result:
        case LettersResult(count=count, refused=refused):
            return f"{count} done, {len(refused)} refused"
        case CountResult(count=count):
            return f"{count} done"
        case ActionResult(result=text):
            return text
    return "done"


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


def parse_class_reference(text: str) -> int | str:
    """Return a class id or class name. Raises ApiError."""
    if not (text.isascii() and text.isdigit()):
        return text
    if len(text) > len(str(CLASS_ID_MAX)) or int(text) > CLASS_ID_MAX:
        raise ApiError(400, f"a class id is from 0 to {CLASS_ID_MAX}, got {text[:40]}")
    return int(text)


def describe_api(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the API."""
    results = [*dict.fromkeys(route.result for route in ROUTES), ErrorBody]
    bodies = [*dict.fromkeys(route.parameters for route in ROUTES)]
    _, components = msgspec.json.schema_components(
        [*results, *bodies], ref_template="#/components/schemas/{name}"
    )
    security: list[dict[str, list[str]]] = [{"basic": []}, {"bearer": []}]
    return {
        "openapi": "3.1.0",
        "info": {"title": "simplebus", "version": version or "0"},
        "paths": {
            PREFIX + route.path: {route.method.lower(): _describe_route(route, components)}
            for route in ROUTES
        },
        "security": security,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
    }


def _describe_route(route: Route, components: Mapping[str, Any]) -> dict[str, Any]:
    schema = components[route.parameters.__name__]
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "description": f"Permission: {route.permission}.",
        "responses": {
            "200": _describe_content("Result.", route.result),
            "default": _describe_content("Error.", ErrorBody),
        },
    }
    if not route.changes:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": name in schema["required"], "schema": each}
            for name, each in schema["properties"].items()
        ]
        return operation
    guard = {"name": "X-Simplebus-Request", "in": "header", "required": True}
    operation["parameters"] = [{**guard, "schema": {"type": "string", "minLength": 1}}]
    operation["requestBody"] = {"required": True, **_content_of(route.parameters)}
    return operation


def _describe_content(description: str, struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"description": description, **_content_of(struct)}


def _content_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{struct.__name__}"}
    return {"content": {JSON: {"schema": reference}}}
