"""What a board shows: one look for all who ask, and how things have changed."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, TypeVar

import pytest

from simplebus.monitor import board as boards
from simplebus.monitor.board import Board
from simplebus.monitor.counted import Counted
from simplebus.monitor.facts import Facts, Health, Telling, merged
from simplebus.monitor.requests import BadRequestError, Request, Response

T = TypeVar("T")


def done(making: Generator[None, None, T]) -> T:
    """What is made, with all pieces at once."""
    while True:
        try:
            next(making)
        except StopIteration as made:
            result: T = made.value
            return result


class Program:
    """Counts, and how often it was asked."""

    def __init__(self) -> None:
        self.count = 0
        self.asked: list[bool] = []
        self.flow = "said"

    def tell(self, detailed: bool) -> Facts:
        self.asked.append(detailed)
        counted = Counted()
        counted.counter(self.flow, "Said.", self.count)
        return Facts(title="it", flows={self.flow: self.count}, metrics=counted.metrics())


def ask(board: Board, target: str, accept: str = "") -> Response:
    return done(board.routes().answer(Request.of(target, accept)))


def ask_json(board: Board, target: str) -> Any:
    return json.loads(ask(board, target).body)


def test_rates_are_what_has_come_each_second() -> None:
    program = Program()
    board = Board(program.tell)
    for second, count in enumerate((0, 10, 10, 40)):
        board.now, program.count = float(second * 2), count
        done(board.tick())
    rates = board.rates()
    assert rates.first == 0
    assert rates.seconds == [2.0, 2.0, 2.0]
    assert rates.flows == {"said": [5.0, 0.0, 15.0]}
    assert board.rates(since=2).flows == {"said": [15.0]}
    assert board.rates(since=3).flows == {}
    assert board.rates(since=99).first == 3


def test_only_the_last_minutes_are_kept_and_they_are_numbered_on() -> None:
    program = Program()
    board = Board(program.tell)
    for second in range(boards.KEPT_TICKS + 11):
        board.now = float(second)
        done(board.tick())
    rates = board.rates(since=3)
    assert rates.first == 10
    assert len(rates.seconds) == boards.KEPT_TICKS


def test_a_flow_that_begins_late_is_missing_before() -> None:
    program = Program()
    board = Board(program.tell)
    for second, flow in enumerate(("said", "said", "heard", "heard")):
        board.now, program.flow = float(second), flow
        done(board.tick())
    assert board.rates().flows == {"said": [0.0, None, None], "heard": [None, None, 0.0]}


def test_a_counter_that_begins_anew_is_no_negative_rate() -> None:
    program = Program()
    board = Board(program.tell)
    for second, count in enumerate((10, 5)):
        board.now, program.count = float(second), count
        done(board.tick())
    assert board.rates().flows == {"said": [0.0]}


def test_however_many_ask_it_is_told_once() -> None:
    program = Program()
    board = Board(program.tell)
    for _ in range(5):
        ask(board, "/metrics")
        ask(board, "/facts")
        ask(board, "/facts")
    assert program.asked == [False, True]
    board.now = boards.FRESH_SECONDS
    ask(board, "/metrics")
    assert program.asked == [False, True, False]


def test_sentences_are_told_while_somebody_reads_them() -> None:
    program = Program()
    board = Board(program.tell)
    done(board.tick())
    board.now = 1.0
    ask(board, "/facts")
    for second in range(2, 10):
        board.now = float(second)
        done(board.tick())
    assert program.asked == [False, True, *[True] * 4, *[False] * 4]


def test_facts_that_are_told_in_pieces_are_facts() -> None:
    def tell(detailed: bool) -> Telling:
        yield
        yield
        return Facts(title="slowly")

    assert ask_json(Board(tell), "/facts")["facts"]["title"] == "slowly"


def test_a_reader_is_told_what_it_does_not_know_yet() -> None:
    program = Program()
    board = Board(program.tell)
    for second in range(5):
        board.now = float(second)
        done(board.tick())
    assert ask_json(board, "/facts?since=2")["rates"]["first"] == 2
    assert ask(board, "/facts?since=-1").status == 400
    assert ask(board, f"/facts?since={'9' * 30}").status == 400


def test_health_is_as_of_the_last_look_or_asked_for() -> None:
    board = Board(lambda detailed: Facts(title="it", health=Health(ready=False, why="a reason")))
    assert ask(board, "/healthz").status == 503
    done(board.tick())
    assert ask_json(board, "/healthz") == {
        "status": "unavailable",
        "live": True,
        "ready": False,
        "draining": False,
        "why": "a reason",
    }
    assert ask(Board(lambda detailed: Facts("it"), Health), "/healthz").status == 200


def test_metrics_come_in_the_format_that_is_asked_for() -> None:
    board = Board(Program().tell)
    plain = ask(board, "/metrics")
    assert plain.content_type.startswith("text/plain; version=0.0.4")
    assert plain.body.endswith(b"simplebus_said_total 0.0\n")
    opened = ask(board, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert opened.content_type.startswith("application/openmetrics-text")
    assert opened.body.endswith(b"# EOF\n")


def test_parts_of_a_program_are_told_with_it_and_its_health_is_its_own() -> None:
    whole = Facts("it", flows={"a": 1}, health=Health())
    part = Facts("part", flows={"b": 2}, health=Health(ready=False, why="it is down"))
    both = merged(whole, [part])
    assert (both.title, both.flows, both.health) == ("it", {"a": 1, "b": 2}, Health())


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "²", "1" * 20])
def test_a_number_of_a_query_that_is_none_is_a_sentence(text: str) -> None:
    request = Request("/connz", {"limit": text})
    with pytest.raises(BadRequestError, match="limit is a whole number, got"):
        request.number("limit", 1, most=10)


def test_a_number_of_a_query_is_bounded() -> None:
    assert Request("/connz", {"limit": "5000"}).number("limit", 1, most=10) == 10
    assert Request("/connz", {}).number("limit", 3, most=10) == 3
