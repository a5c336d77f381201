"""Tests of the administration over HTTP."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest
import trio

import simplebus
from simplebus.core.protocol.requests import NamedClass
from simplebus.core.users.passwords import hash_token
from simplebus.core.users.permissions import (
    AdminRight,
    PermissionRule,
    PermissionRules,
    Permissions,
)
from simplebus.core.users.users import User, Users
from simplebus.server.http import api
from simplebus.server.http.api import BODY_BYTES_MAX
from simplebus.server.http.api_operations import ROUTES, AdminOperations, format_payload
from simplebus.server.http.api_routes import PREFIX, ApiRoute
from simplebus.server.http.api_types import HANDLED_LETTERS_MAX
from simplebus.server.run import RunningServer
from tests.support.http_peer import HttpResponse, open_http_peer
from tests.support.running_server import connect, serving, wait_until

CLASSES = (
    NamedClass(id=6, name="orders"),
    NamedClass(id=7, name="secret"),
    NamedClass(id=8, name="dead.secret"),
)
BOSS = User("boss", token=hash_token("b"))
GUARD = ("X-Simplebus-Request: 1", "Content-Type: application/json")
NO_CLASS = PermissionRules(())
DENIED = PermissionRules(None, (PermissionRule("secret"),))
CHANNEL_DENIED = PermissionRules(None, (PermissionRule("secret", "eu.#"),))
ALL_RIGHTS = tuple((right, "*") for right in AdminRight)


def right(*rights: str) -> tuple[tuple[AdminRight, str], ...]:
    return tuple((AdminRight(each), "*") for each in rights)


@contextlib.asynccontextmanager
async def serving_users(*users: User, **more: object) -> AsyncIterator[RunningServer]:
    async with serving(users=Users((BOSS, *users)), classes=CLASSES, http_port=0, **more) as server:
        yield server


async def call(
    server: RunningServer, path: str, body: object = None, *, token: str = "b"
) -> HttpResponse:
    """Send a request of the API: POST with a body, GET without."""
    peer = await open_http_peer(server)
    credentials = f"Authorization: Bearer {token}"
    if body is None:
        return await peer.request(PREFIX + path, credentials)
    return await peer.post(PREFIX + path, json.dumps(body).encode(), credentials, *GUARD)


@contextlib.asynccontextmanager
async def connected(server: RunningServer, token: str = "b") -> AsyncIterator[simplebus.Bus]:
    async with simplebus.connect(server.addresses[0], token=token) as bus:
        yield bus


async def make_letters(server: RunningServer, *payloads: bytes, class_: str = "secret") -> None:
    """Store dead letters of a class."""
    async with connected(server) as bus:
        async with bus.subscribe(class_, durable="d", auto_ack=False) as subscription:
            for payload in payloads:
                await bus.publish(payload, class_id=class_, channel="eu.x")
            for _ in payloads:
                message = await anext(subscription)
                message.terminate("broken")
        await bus.flush()
    await wait_until(lambda: head(server, f"dead.{class_}") == len(payloads))


def head(server: RunningServer, name: str) -> int:
    registry = server.server.broker.store.class_registry
    return registry.classes[registry.class_id_by_name[name]].ring.head


# Permissions ---------------------------------------------------------------------------------


async def can_list(server: RunningServer) -> bool:
    response = await call(server, "classes", token="t")
    if response.status == 200:
        return "secret" in {cls["name"] for cls in response.json["classes"]}
    assert response.status == 403
    return False


async def can_requeue(server: RunningServer) -> bool:
    response = await call(
        server, "dead-letters/requeue", {"class": "secret", "all": True}, token="t"
    )
    assert response.status in (200, 403, 404)
    return response.status == 200 and bool(response.json["count"])


def is_allowed(path: str, body: object = None) -> Callable[[RunningServer], Awaitable[bool]]:
    async def check(server: RunningServer) -> bool:
        status = (await call(server, path, body, token="t")).status
        assert status in (200, 403, 404), status
        return status == 200

    return check


OPERATIONS: dict[str, Callable[[RunningServer], Awaitable[bool]]] = {
    "list_classes": can_list,
    "peek_messages": is_allowed("messages?class=secret"),
    "list_letters": is_allowed("dead-letters?class=secret"),
    "requeue_letters": can_requeue,
    "drop_letters": is_allowed("dead-letters/drop", {"class": "secret", "all": True}),
    "purge_messages": is_allowed("purge", {"class": "secret", "last": 1}),
    "forget_durable": is_allowed("forget", {"class": "secret", "durable": "d"}),
    "disconnect_session": is_allowed("disconnect", {"session": 1}),
    "start_reload": is_allowed("reload", {}),
    "start_drain": is_allowed("drain", {}),
}
PERMISSIONS: dict[str, tuple[Permissions, set[str]]] = {
    "publish": (Permissions(subscribe=NO_CLASS), set()),
    "subscribe to the whole class": (Permissions(publish=NO_CLASS), {"peek_messages"}),
    "subscribe to channels": (
        Permissions(NO_CLASS, PermissionRules((PermissionRule("secret", "eu.#"),))),
        set(),
    ),
    "inquire": (Permissions(NO_CLASS, NO_CLASS, right("inquire")), {"list_classes"}),
    "monitor": (Permissions(NO_CLASS, NO_CLASS, right("monitor")), {"list_classes"}),
    "fetch": (Permissions(NO_CLASS, NO_CLASS, right("fetch")), {"peek_messages"}),
    "purge": (Permissions(NO_CLASS, NO_CLASS, right("purge")), {"purge_messages"}),
    "configure": (Permissions(NO_CLASS, NO_CLASS, right("configure")), set()),
    "inquire and fetch": (
        Permissions(NO_CLASS, NO_CLASS, right("inquire", "fetch")),
        {"list_classes", "peek_messages", "list_letters"},
    ),
    "inquire, fetch and purge": (
        Permissions(NO_CLASS, NO_CLASS, right("inquire", "fetch", "purge")),
        {"list_classes", "peek_messages", "list_letters", "drop_letters", "purge_messages"},
    ),
    "all rights": (
        Permissions(admin=ALL_RIGHTS),
        set(OPERATIONS) - {"disconnect_session", "start_reload", "start_drain"},
    ),
    "none": (Permissions(NO_CLASS, NO_CLASS), set()),
    "denied": (Permissions(DENIED, DENIED, ALL_RIGHTS), set()),
    "denied to subscribe": (Permissions(subscribe=DENIED, admin=ALL_RIGHTS), set()),
    "denied to subscribe to channels": (
        Permissions(subscribe=CHANNEL_DENIED, admin=ALL_RIGHTS),
        set(),
    ),
    "denied to publish": (
        Permissions(publish=DENIED, admin=ALL_RIGHTS),
        {"list_classes", "peek_messages", "list_letters"},
    ),
    "denied to publish to channels": (
        Permissions(publish=CHANNEL_DENIED, admin=ALL_RIGHTS),
        {"list_classes", "peek_messages", "list_letters"},
    ),
}
"""Permissions of a user, and the operations that it may use in the class `secret`."""


@pytest.mark.parametrize("name", PERMISSIONS)
async def test_every_operation_respects_permissions(name: str) -> None:
    permissions, expected = PERMISSIONS[name]
    user = User("till", token=hash_token("t"), permissions=permissions)
    async with serving_users(user) as server:
        await make_letters(server, b"x")
        before = head(server, "secret"), head(server, "dead.secret")
        allowed = {each for each, is_ok in OPERATIONS.items() if await is_ok(server)}
        assert allowed == expected
        if not expected & {"requeue_letters", "drop_letters", "purge_messages"}:
            registry = server.server.broker.store.class_registry
            for class_id in (7, 8):
                assert not registry.classes[class_id].purged_sequences
            assert (head(server, "secret"), head(server, "dead.secret")) == before


async def test_refused_requeue_keeps_the_letter() -> None:
    rules = Permissions(NO_CLASS, NO_CLASS, right("inquire", "fetch", "purge"))
    async with serving_users(User("till", token=hash_token("t"), permissions=rules)) as server:
        await make_letters(server, b"x")
        body = {"class": "secret", "all": True}
        response = await call(server, "dead-letters/requeue", body, token="t")
        assert response.json["count"] == 0
        (refused,) = response.json["refused"]
        assert refused["error"].startswith("unauthorized")
        assert (await call(server, "dead-letters?class=secret")).json["letters"]


async def test_requeue_without_the_right_to_purge_publishes_nothing() -> None:
    rules = Permissions(subscribe=NO_CLASS, admin=right("inquire", "fetch"))
    async with serving_users(User("till", token=hash_token("t"), permissions=rules)) as server:
        await make_letters(server, b"x")
        body = {"class": "secret", "all": True}
        assert (await call(server, "dead-letters/requeue", body, token="t")).status == 403
        assert head(server, "secret") == 1


async def test_unknown_class_is_the_error_of_an_invisible_one() -> None:
    user = User("till", token=hash_token("t"), permissions=Permissions(NO_CLASS, NO_CLASS))
    async with serving_users(user) as server:
        for path in ("messages", "purge"):
            results = []
            for name in ("secret", "absent"):
                body = {"class": name, "last": 1} if path == "purge" else None
                query = "" if body else f"?class={name}"
                response = await call(server, path + query, body, token="t")
                results.append((response.status, response.body.replace(name.encode(), b"")))
            assert results[0] == results[1]


# Authentication and forgery ------------------------------------------------------------------


@pytest.mark.parametrize(
    "route", [each for each in ROUTES.by_path.values() if each.needs_user], ids=str
)
async def test_requests_need_a_user(route: ApiRoute) -> None:
    by_address = User("local", addresses=("127.0.0.0/8",))
    for users in (None, Users((by_address,)), Users((by_address,), anonymous="local")):
        async with serving(users=users, classes=CLASSES, http_port=0) as server:
            peer = await open_http_peer(server)
            target = PREFIX + route.path
            response = (
                await peer.post(target, b"{}", *GUARD)
                if route.changes
                else await peer.request(target)
            )
            assert response.status == (403 if users is None else 401)


async def test_classes_are_listed_without_users() -> None:
    async with serving(classes=CLASSES, http_port=0) as server:
        peer = await open_http_peer(server)
        response = await peer.request(PREFIX + "classes")
        assert {cls["name"] for cls in response.json["classes"]} >= {"orders", "secret"}
        await peer.send(b"GET /api/v1/classes HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert (await peer.read_response()).status == 421


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (GUARD, 200),
        ((*GUARD, "Origin: http://localhost", "Sec-Fetch-Site: same-origin"), 200),
        (GUARD[1:], 403),
        (GUARD[:1], 415),
        ((GUARD[0], "Content-Type: text/plain"), 415),
        ((*GUARD, "Origin: http://evil.example"), 403),
        ((*GUARD, "Origin: null"), 403),
        ((*GUARD, "Sec-Fetch-Site: cross-site"), 403),
        ((*GUARD, "Sec-Fetch-Site: same-site"), 403),
    ],
)
async def test_pages_of_other_sites_change_nothing(headers: tuple[str, ...], status: int) -> None:
    async with serving_users() as server:
        async with connected(server) as bus:
            await bus.publish(b"x", class_id="secret")
        peer = await open_http_peer(server)
        body = b'{"class": "secret", "last": 1}'
        response = await peer.post(PREFIX + "purge", body, "Authorization: Bearer b", *headers)
        assert response.status == status
        assert bool((await call(server, "messages?class=secret")).json["messages"]) == (
            status != 200
        )


async def test_preflight_requests_are_refused() -> None:
    async with serving_users() as server:
        peer = await open_http_peer(server)
        response = await peer.request(PREFIX + "purge", method="OPTIONS")
        assert response.status == 401
        assert not [header for header in response.headers if header.startswith("access-control")]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b'{"class": "secret", "last": -1}', 400),
        (b'{"class": "secret", "last": 1, "more": 1}', 400),
        (b'{"class": "70000", "last": 1}', 400),
        (b'{"class": "absent", "last": 1}', 404),
        (b" " * (BODY_BYTES_MAX + 1), 413),
    ],
)
async def test_invalid_bodies_are_refused(body: bytes, status: int) -> None:
    async with serving_users() as server:
        peer = await open_http_peer(server)
        response = await peer.post(PREFIX + "purge", body, "Authorization: Bearer b", *GUARD)
        assert response.status == status
        assert response.json["error"]


async def test_client_may_wait_before_it_sends_the_body() -> None:
    async with serving_users() as server:
        peer = await open_http_peer(server)
        lines = ["POST /api/v1/reload HTTP/1.1", "Host: localhost", "Content-Length: 2", *GUARD]
        lines += ["Authorization: Bearer b", "Expect: 100-continue", "", ""]
        await peer.send("\r\n".join(lines).encode())
        first = await peer.stream.receive_some(1 << 16)  # type: ignore[attr-defined]
        assert first.startswith(b"HTTP/1.1 100 ")
        await peer.send(b"{}")
        assert (await peer.read_response()).status == 409


@pytest.mark.parametrize("path", ["nothing", "", "../metrics"])
async def test_unknown_paths(path: str) -> None:
    async with serving_users() as server:
        assert (await call(server, path)).status == 404


# Operations ----------------------------------------------------------------------------------


async def test_peek_shows_messages_in_pages() -> None:
    async with serving_users() as server:
        async with connected(server) as bus:
            for number in range(5):
                await bus.publish(
                    b'{"n": %d}' % number, class_id="orders", channel="eu", headers={"a": "b"}
                )
        page = (await call(server, "messages?class=orders&count=3")).json
        assert [message["payload"] for message in page["messages"]] == [
            {"n": 0},
            {"n": 1},
            {"n": 2},
        ]
        assert page["messages"][0]["headers"] == [["a", "b"]]
        assert page["messages"][0]["channel"] == "eu"
        assert page["next"] == 3
        page = (await call(server, "messages?class=6&count=3&first=3&format=hex&bytes=2")).json
        assert [message["payload"] for message in page["messages"]] == ["7b22", "7b22"]
        assert page["messages"][0]["is_truncated"]
        assert page["messages"][0]["payload_bytes"] == 8
        assert page["next"] is None


@pytest.mark.parametrize(
    ("payload", "preferred", "bytes_max", "expected"),
    [
        (b'{"a": 1}', "text", 99, ('{"a": 1}', "text")),
        (b'{"a": 1}', "json", 4, ('{"a"', "text")),
        ("é".encode(), "text", 1, ("", "text")),
        (b"\xff", "json", 9, ("ff", "hex")),
        (b"[" * 9999, "json", 9999, ("[" * 9999, "text")),
        (b"", "json", 9, ("", "text")),
        (b"ab", "hex", 9, ("6162", "hex")),
    ],
)
def test_payload_formats(
    payload: bytes, preferred: Any, bytes_max: int, expected: tuple[str, str]
) -> None:
    assert format_payload(payload, preferred, bytes_max) == expected


async def test_dead_letters_are_requeued_and_dropped() -> None:
    async with serving_users() as server:
        await make_letters(server, b"1", b"2", b"3")
        page = (await call(server, "dead-letters?class=secret&count=2&format=text")).json
        assert [letter["payload"] for letter in page["letters"]] == ["1", "2"]
        assert page["letters"][0]["reason"] == "terminated"
        assert page["letters"][0]["error"] == "broken"
        assert page["next"] == 2
        body: dict[str, object] = {"class": "secret", "sequences": [1]}
        assert (await call(server, "dead-letters/requeue", body)).json["count"] == 1
        assert head(server, "secret") == 4
        body = {"class": "dead.secret", "reason": "terminated", "first": 2}
        assert (await call(server, "dead-letters/drop", body)).json["count"] == 1
        page = (await call(server, "dead-letters?class=secret&reason=terminated")).json
        assert [letter["sequence"] for letter in page["letters"]] == [0]
        assert (await call(server, "dead-letters?class=secret&reason=x")).json["letters"] == []
        for wrong in ({"class": "secret"}, {"class": "secret", "all": True, "reason": "x"}):
            assert (await call(server, "dead-letters/drop", wrong)).status == 400
        assert (await call(server, "dead-letters?class=orders")).status == 404


async def test_letters_of_successive_requests_are_all_published() -> None:
    async with serving_users() as server:
        await make_letters(server, b"1", b"2", b"3")
        for sequence in (2, 0, 1):
            body = {"class": "secret", "sequences": [sequence]}
            assert (await call(server, "dead-letters/requeue", body)).json["count"] == 1
        page = (await call(server, "messages?class=secret&format=text")).json
        assert [message["payload"] for message in page["messages"]][-3:] == ["3", "1", "2"]


async def test_many_dead_letters_are_dropped_in_several_requests() -> None:
    async with serving_users() as server:
        async with connected(server) as bus:
            for _ in range(HANDLED_LETTERS_MAX + 5):
                await bus.publish(b"x", class_id="dead.secret", confirm=False)
            await bus.flush()
        body = {"class": "secret", "all": True}
        first = (await call(server, "dead-letters/drop", body)).json
        assert first["count"] == first["next"] == HANDLED_LETTERS_MAX
        second = (await call(server, "dead-letters/drop", body)).json
        assert second == {"count": 5, "refused": [], "next": None}


async def test_forget_removes_an_idle_durable() -> None:
    async with serving_users() as server, connected(server) as bus:
        body = {"class": "orders", "durable": "d"}
        async with bus.subscribe("orders", durable="d"):
            response = await call(server, "forget", body)
            assert response.status == 409
            assert "is connected" in response.json["error"]
        assert (await call(server, "forget", body)).status == 200
        assert not server.server.broker.classes[6].positions
        assert (await call(server, "forget", body)).status == 409


async def test_disconnect_closes_a_connection() -> None:
    async with serving_users() as server:
        peer = await connect(server)
        await wait_until(lambda: bool(server.server.connections))
        (session_id,) = server.server.connections
        body = {"session": session_id}
        assert (await call(server, "disconnect", body)).status == 200
        assert await peer.wait_closed()
        await wait_until(lambda: not server.server.connections)
        assert (await call(server, "disconnect", body)).status == 404


async def test_reload_reads_the_configuration() -> None:
    read = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def reload() -> Any:
        token.run_sync_soon(read.set)
        raise ValueError("no change")

    async with serving_users(reload=reload) as server:
        assert (await call(server, "reload", {})).status == 200
        with trio.fail_after(240):
            await read.wait()
    async with serving_users() as server:
        assert (await call(server, "reload", {})).status == 409


async def test_drain_ends_the_server() -> None:
    async with serving_users() as server:
        assert (await call(server, "drain", {})).json == {"result": "draining"}
        await wait_until(lambda: server.server.has_ended)


async def test_sessions_of_requests_are_closed() -> None:
    async with serving_users() as server:
        for _ in range(3):
            await call(server, "classes")
        assert not server.server.local_clients
        assert not server.server.broker.sessions


async def test_slow_request_ends_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = trio.Event()

    async def purge_forever(operations: AdminOperations, parameters: object) -> None:
        if api.REQUEST_SECONDS_MAX:
            started.set()
        await trio.sleep_forever()

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(AdminOperations, "purge_messages", purge_forever)
    monkeypatch.setattr(api, "REQUEST_SECONDS_MAX", 0.0)
    async with serving_users() as server:
        assert (await call(server, "purge", {"class": "orders", "last": 1})).status == 504
        monkeypatch.setattr(api, "REQUEST_SECONDS_MAX", 600.0)
        peer = await open_http_peer(server)
        body = b'{"class": "orders", "last": 1}'
        lines = [f"POST {PREFIX}purge HTTP/1.1", "Host: localhost", *GUARD]
        lines += ["Authorization: Bearer b", f"Content-Length: {len(body)}", "", ""]
        await peer.send("\r\n".join(lines).encode() + body)
        await started.wait()
    outcomes = [record.outcome for record in caplog.records if hasattr(record, "outcome")]
    assert outcomes == ["the request did not finish within 0 s", "interrupted"]


@pytest.mark.parametrize("name", ["a b", "#", "\x00", "é", "x" * 256, "-1", "0"])
async def test_unusual_class_names(name: str) -> None:
    async with serving_users() as server:
        body = {"class": name, "durable": name, "last": 1, "all": True}
        schemas = ROUTES.describe("1")["components"]["schemas"]
        for route in ROUTES.by_path.values():
            fields = schemas[route.parameters.__name__].get("properties", {})
            if "class" not in fields:
                continue
            arguments = {key: value for key, value in body.items() if key in fields}
            response = (
                await call(server, route.path, arguments)
                if route.changes
                else await call(server, f"{route.path}?class={quote(name)}")
            )
            assert response.status in (400, 404, 409), (route.path, response.json)


async def test_every_changing_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving_users() as server:
        for route in ROUTES.by_path.values():
            if route.changes and route.operation != "start_drain":
                await call(server, route.path, {"class": "absent", "last": 1, "session": 9})
            elif not route.changes:
                await call(server, route.path)
        await call(server, "purge", {"class": "secret", "last": 1})
    records = [
        record for record in caplog.records if getattr(record, "event", "") == "admin.requested"
    ]
    changing = [each.operation for each in ROUTES.by_path.values() if each.changes]
    assert [record.action for record in records][:-1] == changing[:-1]  # type: ignore[attr-defined]
    last: Any = records[-1]
    assert (last.user, last.action, last.class_name) == ("boss", "purge_messages", "secret")
    assert last.outcome == "0 done"


# Description ---------------------------------------------------------------------------------


def test_description_is_valid_openapi() -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator  # Slow, like jsonschema.

    description = ROUTES.describe("1.2")
    OpenAPIV31SpecValidator(description).validate()
    operations = [each for item in description["paths"].values() for each in item.values()]
    operation_ids = {operation["operationId"] for operation in operations}
    assert operation_ids == {each.operation for each in ROUTES.by_path.values()} == set(OPERATIONS)
    assert all(operation["summary"].endswith(".") for operation in operations)


async def test_description_is_served_and_replies_match_it() -> None:
    import jsonschema

    async with serving_users() as server:
        await make_letters(server, b"x", b"y")
        description = (await call(server, "openapi.json")).json
        requests: dict[str, object] = {
            "classes": None,
            "messages?class=secret": None,
            "dead-letters?class=secret": None,
            "dead-letters/requeue": {"class": "secret", "sequences": [0]},
            "dead-letters/drop": {"class": "secret", "all": True},
            "purge": {"class": "secret", "last": 9},
            "forget": {"class": "secret", "durable": "d"},
            "disconnect": {"session": 99},
            "reload": {},
        }
        for path, body in requests.items():
            response = await call(server, path, body)
            item = description["paths"][PREFIX + path.partition("?")[0]]
            responses = item["get" if body is None else "post"]["responses"]
            found = responses.get(str(response.status), responses["default"])
            schema = found["content"]["application/json"]["schema"]
            jsonschema.validate(response.json, {**schema, "components": description["components"]})
        peer = await open_http_peer(server)
        assert (await peer.request(PREFIX + "openapi.json")).status == 401
