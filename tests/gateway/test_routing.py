"""Giving a message to the only one who hears it is as giving it to all, who are one; and what finds
no room comes in."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from simplebus.gateway.blocking import ThreadGate
from simplebus.gateway.errors import ModuleBusError
from simplebus.gateway.mailbox import FullQueuePolicy, Mailbox
from simplebus.gateway.messages import QUEUE_UNIT_BYTES, ModuleMessage
from simplebus.gateway.routing import Router

NAMES = ["a", "b", "c"]  # Modules, of which none, one or all hear what is said.
SOURCES = [None, *NAMES, "nobody"]


class Slow(Router):
    """Knows no shorter way."""

    def give(self, message: ModuleMessage, source: object | None) -> bool:
        with self.lock:
            return self.try_deliver(message, self.route(source))


class World:
    """A switchboard and its mailboxes, whose workers are played by the test."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.mailboxes: dict[str, Mailbox] = {}
        self.woken: list[str] = []

    def step(self, what: str, name: str, other: str | None, number: int) -> object:
        """What came of it."""
        router = self.router
        try:
            if what == "add":
                full = list(FullQueuePolicy)[number % 3]
                mailbox = Mailbox(router, name, 1 + number % 4, full)
                mailbox.hears_all = number % 2 == 0
                router.attach(mailbox)
                mailbox.wake_callback = lambda: self.woken.append(name)
                self.mailboxes[name] = mailbox
            elif what == "remove":
                router.detach(router.find(name))
            elif what == "link":
                router.link(other, name)
            elif what == "unlink":
                router.unlink(other, name)
            elif what == "take":
                router.find(name)
                return list(self.mailboxes[name]._take_all())
            else:
                content = b"x" * (number % 3 * QUEUE_UNIT_BYTES) + b"%d" % number
                return router.publish(ModuleMessage(content), other)
        except ModuleBusError as error:
            return error.result
        return None

    def state(self) -> list[object]:
        """All that can be seen."""
        mailboxes = [
            (name, list(mailbox.queue), mailbox.free_units, mailbox.dropped, mailbox.lost_count)
            for name, mailbox in self.mailboxes.items()
        ]
        return [*mailboxes, self.woken, self.router.published]


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
def test_fast_path_equals_slow_path(
    steps: list[tuple[str, str, str | None, int]],
) -> None:
    """Lists are long enough for one who hears alone to fill up, and to be joined by others."""
    quick, slow = World(Router("quick")), World(Slow("slow"))
    for step in [("add", "a", None, 6), *steps]:
        assert quick.step(*step) == slow.step(*step)
        assert quick.state() == slow.state()


def test_blocked_message_needs_room_one_after_the_other() -> None:
    router, other = Router("bus"), ModuleMessage(b"other")
    one, two = (Mailbox(router, name, 1, FullQueuePolicy.BLOCK) for name in "ab")
    for mailbox, source in (one, "to one"), (two, "to two"):
        router.attach(mailbox)
        mailbox.hears_all = False
        router.attach(Mailbox(router, source, 1, FullQueuePolicy.BLOCK))
        router.link(source, mailbox.module)
        assert router.publish(other, source)
    message = ModuleMessage(b"to both")
    assert not router.try_deliver(message, (one, two))
    router.block_publish(message, (one, two), ThreadGate())
    assert list(one._take_all()) == [other]
    assert router.publish(other, "to one"), "it has room while the other has none"
    assert router.blocked_count == 1
    assert list(two._take_all()) == [other]
    assert router.blocked_count == 0
    assert list(one._take_all()) == [other, message]
    assert list(two._take_all()) == [message]
