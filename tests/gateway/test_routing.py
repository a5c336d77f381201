"""Giving a message to the only one who hears it is as giving it to all, who are one; and what finds
no room comes in."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from simplebus.gateway.blocking import ThreadGate
from simplebus.gateway.errors import ModuleBusError
from simplebus.gateway.mailbox import Full, Mailbox
from simplebus.gateway.messages import PLACE_BYTES, ModuleMessage
from simplebus.gateway.routing import Switchboard

NAMES = ["a", "b", "c"]  # Modules, of which none, one or all hear what is said.
SOURCES = [None, *NAMES, "nobody"]


class Slow(Switchboard):
    """Knows no shorter way."""

    def give(self, message: ModuleMessage, source: object | None) -> bool:
        with self.lock:
            return self.takes(message, self.route(source))


class World:
    """A switchboard and its mailboxes, whose workers are played by the test."""

    def __init__(self, board: Switchboard) -> None:
        self.board = board
        self.boxes: dict[str, Mailbox] = {}
        self.woken: list[str] = []

    def step(self, what: str, name: str, other: str | None, number: int) -> object:
        """What came of it."""
        board = self.board
        try:
            if what == "add":
                full = list(Full)[number % 3]
                box = Mailbox(board, name, 1 + number % 4, full)
                box.hears_all = number % 2 == 0
                board.attach(box)
                box.wake = lambda: self.woken.append(name)
                self.boxes[name] = box
            elif what == "remove":
                board.detach(board.find(name))
            elif what == "link":
                board.link(other, name)
            elif what == "unlink":
                board.unlink(other, name)
            elif what == "take":
                board.find(name)
                return list(self.boxes[name]._grab())
            else:
                content = b"x" * (number % 3 * PLACE_BYTES) + b"%d" % number
                return board.give(ModuleMessage(content), other)
        except ModuleBusError as error:
            return error.result
        return None

    def state(self) -> list[object]:
        """All that can be seen."""
        boxes = [
            (name, list(box.queue), box.room, box.dropped, box.lost)
            for name, box in self.boxes.items()
        ]
        return [*boxes, self.woken, self.board.published]


STEPS = st.tuples(
    st.sampled_from(["add", "remove", "link", "unlink", "take", "give", "give", "give"]),
    st.sampled_from(NAMES),
    st.sampled_from(SOURCES),
    st.integers(0, 11),
)


SAY = ("give", "a", None, 1)


@given(st.lists(STEPS, max_size=40))
@example([SAY, ("add", "b", None, 6), SAY])
@example([SAY, ("remove", "a", None, 0), SAY])
@example([SAY, ("unlink", "a", None, 0), SAY])
@example([SAY, SAY, SAY, SAY, ("take", "a", None, 0), SAY])
def test_the_short_way_leads_where_the_long_one_does(
    steps: list[tuple[str, str, str | None, int]],
) -> None:
    """Lists are long enough for one who hears alone to fill up, and to be joined by others."""
    quick, slow = World(Switchboard("quick")), World(Slow("slow"))
    for step in [("add", "a", None, 6), *steps]:
        assert quick.step(*step) == slow.step(*step)
        assert quick.state() == slow.state()


def test_what_waits_for_two_who_never_have_room_at_once_comes_in() -> None:
    board, other = Switchboard("bus"), ModuleMessage(b"other")
    one, two = (Mailbox(board, name, 1, Full.BLOCK) for name in "ab")
    for box, source in (one, "to one"), (two, "to two"):
        board.attach(box)
        box.hears_all = False
        board.attach(Mailbox(board, source, 1, Full.BLOCK))
        board.link(source, box.module)
        assert board.give(other, source)
    message = ModuleMessage(b"to both")
    assert not board.takes(message, (one, two))
    board.wait_outside(message, (one, two), ThreadGate())
    assert list(one._grab()) == [other]
    assert board.give(other, "to one"), "it has room while the other has none"
    assert board.waiting == 1
    assert list(two._grab()) == [other]
    assert board.waiting == 0
    assert list(one._grab()) == [other, message]
    assert list(two._grab()) == [message]
