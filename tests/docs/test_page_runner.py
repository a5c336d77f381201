"""Tests of the rules of the page runner for servers and ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.page_runner import PageError, PageRunner

SERVE = "simplebus serve --no-nats --no-http --data-dir data\n"
UNITS = "simplebus.socket simplebus.service"


def test_stopped_server_can_be_started_again(tmp_path: Path) -> None:
    page = (
        f'```sh\n{SERVE}simplebus pub orders "7 books"\nsystemctl stop {UNITS}\n```\n\n'
        '```console\n$ simplebus pub orders "8 lamps"\nsimplebus: cannot connect …\n```\n\n'
        f"```sh\nsystemctl start {UNITS}\n```\n\n"
        "```console\n$ simplebus sub orders --count 1\n7 books\n```\n"
    )
    PageRunner(page, tmp_path).run()


def test_restarted_server_keeps_its_options(tmp_path: Path) -> None:
    page = (
        f'```sh\n{SERVE}simplebus pub orders "7 books"\nsystemctl restart simplebus\n```\n\n'
        "```console\n$ simplebus sub orders --count 1\n7 books\n```\n"
    )
    PageRunner(page, tmp_path).run()


@pytest.mark.parametrize("action", ["stop", "start", "restart"])
def test_systemctl_needs_a_server(action: str, tmp_path: Path) -> None:
    page = f"```sh\nsystemctl {action} simplebus\n```\n"
    with pytest.raises(PageError, match="line 2: systemctl needs a server"):
        PageRunner(page, tmp_path).run()


def test_output_shows_the_ports_of_the_page(tmp_path: Path) -> None:
    page = "```console\n$ echo simplebus://localhost:8888\nsimplebus://localhost:8888\n```\n"
    PageRunner(page, tmp_path).run()
