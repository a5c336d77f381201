"""Tests of `simplebus disconnect`, `reload` and `drain`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import simplebus
from tests.support.programs import Program, run_program, run_server

TOKEN = "a token of the operators"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Program, str]]:
    users = tmp_path / "users.toml"
    users.write_text(
        f'[[users]]\nname = "ops"\ntoken = "{TOKEN}"\n'
        '[[users]]\nname = "till"\ntoken = "a token of the till"\npermissions = {}\n'
    )
    users.chmod(0o600)
    with run_server("--no-nats", "--host", "127.0.0.1", "--users", str(users)) as started:
        yield started


def run_admin(program: Program, *words: str, token: str = TOKEN) -> tuple[int, str, str]:
    return run_program(*words, "--url", f"http://{program.http_address}", SIMPLEBUS_TOKEN=token)


def test_disconnect_reload_and_drain(server: tuple[Program, str]) -> None:
    program, url = server
    with simplebus.connect_blocking(url, token=TOKEN) as bus:
        (session,) = (session.session for session in bus.explain().sessions)
        output = run_admin(program, "disconnect", str(session))
        assert output == (0, f"disconnected session {session}\n", "")
        (next_session,) = (session.session for session in bus.explain().sessions)
        assert next_session != session
    status, _, errors = run_admin(program, "disconnect", "99")
    assert (status, errors.split(": ")[-1]) == (1, "no session 99 is connected\n")
    assert run_admin(program, "reload")[:2] == (0, "reload started; the log has its result\n")
    assert run_admin(program, "drain") == (0, "draining\n", "")
    assert program.process.wait(60) == 0


@pytest.mark.parametrize("words", [("disconnect", "1"), ("reload",), ("drain",)])
def test_permissions_are_required(server: tuple[Program, str], words: tuple[str, ...]) -> None:
    program, _ = server
    status, output, errors = run_admin(program, *words, token="a token of the till")
    assert (status, output) == (1, "")
    assert "user 'till' has a permissions table" in errors
    status, _, errors = run_admin(program, *words, token="wrong")
    assert status == 1
    assert "replied 401" in errors
