"""The module bus with threads: delivery, full queues, removal, and waits that always end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from simplebus.gateway import (
    FullQueuePolicy,
    ModuleBus,
    ModuleBusError,
    ModuleBusFullError,
    ModuleMessage,
    Result,
)
from tests.gateway.recording_modules import (
    TIMEOUT_SECONDS,
    HeldListener,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)

BOTH = "begins", "ends"


def full_module(bus: ModuleBus, **options: object) -> HeldListener:
    """Add a module that is in its callback and has a full queue with one message."""
    held_module = HeldListener()
    bus.add_module(held_module, places=1, **options)  # type: ignore[arg-type]
    bus.publish(text_message("first"))
    held_module.wait_entered()
    bus.publish(text_message("second"))
    return held_module


def wait_for_publishers(bus: ModuleBus, count: int) -> None:
    """Wait until `count` publishers wait for room."""
    for _ in range(TIMEOUT_SECONDS * 1000):
        if bus.statistics().waiting == count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(bus.statistics())


def publish_many(bus: ModuleBus, source: object, name: str) -> None:
    for number in range(200):
        bus.publish(text_message(f"{name}{number}"), source=source)


# Delivery ---------------------------------------------------------------------------------------


def test_modules_receive_all_others_in_same_order() -> None:
    with ModuleBus() as bus:
        first, second, third = Listener(), Listener(), Listener()
        for module in first, second, third:
            bus.add_module(module)
        joins = [
            run_in_thread(partial(publish_many, bus, module, name))
            for module, name in ((first, "a"), (second, "b"))
        ]
        for join in joins:
            join.join()
        results_ = third.wait(400)
        assert first.wait(200) == [text for text in results_ if text[0] == "b"]
        assert second.wait(200) == [text for text in results_ if text[0] == "a"]
        assert [text for text in results_ if text[0] == "a"] == [f"a{i}" for i in range(200)]
        bus.publish(text_message("to all"))
        assert [
            module.wait(n)[-1] for module, n in ((first, 201), (second, 201), (third, 401))
        ] == ["to all"] * 3
        assert all(len(module.threads) == 1 for module in (first, second, third))
    assert_no_threads_left()


def test_linked_module_receives_only_its_source() -> None:
    with ModuleBus() as bus:
        first, second, sink = Listener(), Listener(), Listener()
        bus.add_module(first)
        bus.add_module(second)
        bus.add_module(sink, hears_all=False)
        bus.link(first, sink)
        with pytest.raises(ModuleBusError, match="already") as raised:
            bus.link(first, sink)
        assert raised.value.result is Result.INVALIDARG
        with pytest.raises(ModuleBusError, match="is already linked to everyone else"):
            bus.link(None, first)
        for source in first, second, None, object():
            bus.publish(text_message(f"{source is first}"), source=source)
        bus.link(sink, sink)
        bus.publish(text_message("itself"), source=sink)
        bus.unlink(first, sink)
        bus.publish(text_message("unheard"), source=first)
        bus.link(None, sink)
        bus.publish(text_message("anyone"))
        assert sink.wait(3) == ["True", "itself", "anyone"]
        bus.unlink(None, sink)
        with pytest.raises(ModuleBusError, match="is not linked to everyone else"):
            bus.unlink(None, sink)
        with pytest.raises(ModuleBusError, match="is not linked to"):
            bus.unlink(first, sink)
        with pytest.raises(ModuleBusError, match="not on the bus"):
            bus.link(object(), sink)


def test_removed_module_loses_its_links() -> None:
    with ModuleBus() as bus:
        first, sink = Listener(), Listener()
        bus.add_module(first)
        bus.add_module(sink, hears_all=False)
        bus.link(first, sink)
        bus.remove_module(first)
        bus.add_module(first)
        bus.publish(text_message("unheard"), source=first)
        bus.link(first, sink)
        bus.publish(text_message("heard"), source=first)
        assert sink.wait(1) == ["heard"]


def test_function_can_be_module() -> None:
    received: list[bytes] = []
    handled = threading.Event()

    def write_down(message: ModuleMessage) -> None:
        received.append(message.content)
        handled.set()

    with ModuleBus() as bus:
        bus.add_module(write_down)
        bus.publish(text_message("hello"))
        assert handled.wait(TIMEOUT_SECONDS)
    assert received == [b"hello"]


class OwnError(BaseException):
    """Error that is no Exception."""


@pytest.mark.parametrize(
    "raised", [ValueError("on purpose"), SystemExit(3), KeyboardInterrupt(), OwnError()]
)
def test_any_callback_exception_loses_one_message(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: ModuleMessage) -> None:
        if message.content == b"1":
            raise raised

    with ModuleBus() as bus:
        module = Listener(fail)
        bus.add_module(module)
        for number in range(3):
            bus.publish(text_message(str(number)))
        assert module.wait(3) == ["0", "1", "2"]
        bus.wait_quiet()
        ((_, statistics),) = bus.statistics().modules
        assert (statistics.delivered, statistics.failed) == (3, 1)
    assert type(raised).__name__ in caplog.text


def test_log_of_a_failing_module_is_limited_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    def fail(message: ModuleMessage) -> None:
        raise ValueError("broken")

    with ModuleBus() as bus:
        bus.add_module(Listener(fail))
        for number in range(200):
            bus.publish(text_message(str(number)))
        bus.wait_quiet()
        ((_, statistics),) = bus.statistics().modules
    assert statistics.failed == 200
    counts = [record.getMessage().rpartition(" ")[2] for record in caplog.records]
    assert counts == ["1", "2", "3", "4", "8", "16", "32", "64", "128"]


def test_log_of_malformed_messages_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    with ModuleBus() as bus:
        for _ in range(100):
            bus.publish(b"malformed")
        assert bus.statistics().malformed == 100
    assert [vars(record)["event"] for record in caplog.records] == ["module_message.malformed"] * 8


# Waiting messages --------------------------------------------------------------------------------


def test_full_queue_blocks_publisher() -> None:
    with ModuleBus() as bus:
        held_module, listener = full_module(bus), Listener()
        bus.add_module(listener)
        with pytest.raises(ModuleBusFullError, match=r"is full \(1 messages\)") as raised:
            bus.publish_nowait(text_message("third"))
        assert raised.value.result is Result.ERROR
        waiting = run_in_thread(lambda: bus.publish(text_message("third")))
        wait_for_publishers(bus, 1)
        assert listener.received == [], "the message reaches all modules at once"
        held_module.release()
        waiting.join()
        assert held_module.wait(3) == ["first", "second", "third"]
        assert listener.wait(1) == ["third"]


def test_blocked_publishers_are_served_in_order() -> None:
    with ModuleBus() as bus:
        held_module = full_module(bus)
        joins = []
        for number in range(5):
            joins.append(run_in_thread(lambda n=number: bus.publish(text_message(str(n)))))  # type: ignore[misc]
            wait_for_publishers(bus, number + 1)
        held_module.release()
        for join in joins:
            join.join()
        assert held_module.wait(7)[2:] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("full", "expected"),
    [(FullQueuePolicy.DROP_OLDEST, "fourth"), (FullQueuePolicy.DROP_NEWEST, "second")],
)
def test_drop_policies_drop_messages(full: FullQueuePolicy, expected: str) -> None:
    with ModuleBus() as bus:
        held_module, listener = full_module(bus, full=full), Listener()
        bus.add_module(listener)
        for text in "third", "fourth":
            bus.publish(text_message(text))
        assert listener.wait(2) == ["third", "fourth"]
        assert bus.statistics().modules[0][1].dropped == 2
        held_module.release()
        assert held_module.wait(2) == ["first", expected]


def test_drop_oldest_counts_each_dropped_message() -> None:
    with ModuleBus() as bus:
        held_module = HeldListener()
        bus.add_module(held_module, places=2, full=FullQueuePolicy.DROP_OLDEST)
        bus.publish(text_message("first"))
        held_module.wait_entered()
        bus.publish(text_message("a"))
        bus.publish(ModuleMessage(b"x" * 300_000))
        bus.publish(text_message("b"))
        assert bus.statistics().modules[0][1].dropped == 2
        held_module.release()
        assert held_module.wait(2) == ["first", "b"]


def test_long_message_fills_several_queue_units() -> None:
    with ModuleBus() as bus:
        held_module = HeldListener()
        bus.add_module(held_module, places=4)
        bus.publish(text_message("first"))
        held_module.wait_entered()
        long_message = ModuleMessage(b"x" * 300_000)
        bus.publish_nowait(text_message("a"))
        bus.publish_nowait(long_message)
        assert long_message.places == 5
        with pytest.raises(ModuleBusFullError):
            bus.publish_nowait(text_message("b"))
        statistics = bus.statistics().modules[0][1]
        assert statistics.waiting == 2
        assert statistics.waiting_bytes == 300_000 + 15 + 16
        held_module.release()
        held_module.wait(3)
        bus.publish_nowait(text_message("b"))
        assert held_module.wait(4)[-1] == "b"


def test_removal_unblocks_publishers() -> None:
    with ModuleBus() as bus:
        held_module, listener = full_module(bus), Listener()
        bus.add_module(listener)
        waiting = run_in_thread(lambda: bus.publish(text_message("third")))
        wait_for_publishers(bus, 1)
        leaving = run_in_thread(lambda: bus.remove_module(held_module))
        waiting.join()
        assert listener.wait(1) == ["third"]
        held_module.release()
        leaving.join()
        assert held_module.received == ["first"]
        assert bus.statistics().lost == 1


def test_wait_quiet_returns_after_last_delivery() -> None:
    with ModuleBus() as bus:
        bus.wait_quiet()
        calls: list[str] = []

        def wait_quiet_in_callback(message: ModuleMessage) -> None:
            try:
                bus.wait_quiet()
            except ModuleBusError as error:
                calls.append(str(error))

        last = Listener(wait_quiet_in_callback)
        first = Listener(lambda message: bus.publish(message, source=first))
        bus.add_module(first)
        bus.add_module(last, hears_all=False)
        bus.link(first, last)
        for number in range(200):
            bus.publish(text_message(str(number)))
        bus.wait_quiet()
        assert len(last.received) == 200
        assert len(calls) == 200
        assert "modules are busy" in calls[0]


def test_module_with_failing_repr_is_accepted() -> None:
    """A `repr` that raises, is endless, or uses the bus neither fails a call nor blocks the bus."""

    class Strange(Listener):
        def __init__(self, name: Callable[[], str]) -> None:
            super().__init__()
            self.name = name

        def __repr__(self) -> str:
            return self.name()

    def fail() -> str:
        raise ValueError("on purpose")

    with ModuleBus() as bus:
        for name in fail, lambda: "x" * 100_000, lambda: f"on {bus.statistics()}":
            module = Strange(name)
            for call in (
                lambda module=module: bus.remove_module(module),
                lambda module=module: bus.link(module, module),
                lambda module=module: bus.unlink(None, module),
            ):
                with pytest.raises(ModuleBusError, match="is not on the bus") as raised:
                    run_in_thread(call).join()
            bus.add_module(module)
            for call in (
                lambda module=module: bus.add_module(module),
                lambda module=module: bus.link(None, module),
                lambda module=module: bus.unlink(module, module),
                lambda module=module: bus.link(Strange(module.name), module),
            ):
                with pytest.raises(ModuleBusError) as raised:
                    run_in_thread(call).join()
                assert len(str(raised.value)) < 1000
            bus.remove_module(module)
    assert_no_threads_left()


# Waiting ends ------------------------------------------------------------------------------------


def test_mutually_full_queues_do_not_deadlock() -> None:
    refused: list[str] = []
    results_, finished = threading.Barrier(2), threading.Semaphore(0)

    def flood(module: Listener, message: ModuleMessage) -> None:
        if message.content == b"go":
            results_.wait(TIMEOUT_SECONDS)
            try:
                for _ in range(4):
                    bus.publish(text_message("more"), source=module)
            except ModuleBusFullError as error:
                refused.append(str(error))
            finished.release()

    with ModuleBus() as bus:
        first = Listener(lambda message: flood(first, message))
        second = Listener(lambda message: flood(second, message))
        for module in first, second:
            bus.add_module(module, places=2)
        bus.publish(text_message("go"))
        for _ in range(2):
            assert finished.acquire(timeout=TIMEOUT_SECONDS)
    assert refused
    assert all("would not end" in text for text in refused)


def test_self_linked_module_does_not_deadlock() -> None:
    refused = threading.Event()

    def flood(message: ModuleMessage) -> None:
        try:
            for _ in range(3):
                bus.publish(text_message("more"))
        except ModuleBusFullError:
            refused.set()

    with ModuleBus() as bus:
        bus.add_module(Listener(flood), places=2)
        bus.publish(text_message("go"))
        assert refused.wait(TIMEOUT_SECONDS)


def test_wait_quiet_on_other_bus_ends() -> None:
    """A callback waits until the other bus is quiet, and a module there waits for room on the
    first.
    """
    calls: list[str] = []
    with ModuleBus() as first_bus, ModuleBus() as second_bus:
        is_waiting, is_sending = threading.Event(), threading.Event()

        def wait_quiet_in_callback(message: ModuleMessage) -> None:
            if message.content == b"go":
                assert is_sending.wait(TIMEOUT_SECONDS)
                is_waiting.set()
                try:
                    second_bus.wait_quiet()
                except ModuleBusError as error:
                    calls.append(str(error))

        def send(message: ModuleMessage) -> None:
            is_sending.set()
            assert is_waiting.wait(TIMEOUT_SECONDS)
            try:
                for _ in range(3):
                    first_bus.publish(text_message("more"))
            except ModuleBusFullError as error:
                calls.append(str(error))

        asking = Listener(wait_quiet_in_callback)
        first_bus.add_module(asking, places=1)
        second_bus.add_module(send)
        first_bus.publish(text_message("go"))
        second_bus.publish(text_message("go"))
        second_bus.wait_quiet()
        first_bus.wait_quiet()
        assert len(calls) == 1
        assert "would not end" in calls[0]
    assert_no_threads_left()


@pytest.mark.parametrize("by", ["remove_module", "destroy"])
def test_callback_can_remove_its_module(by: str) -> None:
    bus = ModuleBus()
    handled = threading.Event()

    def leave(message: ModuleMessage) -> None:
        if by == "destroy":
            bus.destroy()
        else:
            bus.remove_module(module)
            bus.publish(text_message("farewell"), source=module)
        handled.set()

    module, listener = Listener(leave), Listener()
    bus.add_module(module)
    bus.add_module(listener)
    bus.publish(text_message("go"))
    assert handled.wait(TIMEOUT_SECONDS)
    if by == "remove_module":
        assert listener.wait(2) == ["go", "farewell"]
        bus.destroy()
    assert_no_threads_left()
    assert module.received == ["go"]


def test_readded_module_waits_for_its_callback() -> None:
    calls: list[str] = []
    added, may_continue = threading.Event(), threading.Event()

    def remove_and_add(message: ModuleMessage) -> None:
        calls.append(f"begins {message.content.decode()}")
        if message.content == b"go":
            bus.remove_module(module)
            bus.add_module(module, places=1)
            bus.publish(text_message("more"))
            with pytest.raises(ModuleBusFullError, match="would not end"):
                bus.publish(text_message("too much"))
            added.set()
            assert may_continue.wait(TIMEOUT_SECONDS)
        calls.append(f"ends {message.content.decode()}")

    module = Listener(remove_and_add)
    with ModuleBus() as bus:
        bus.add_module(module)
        bus.publish(text_message("go"))
        assert added.wait(TIMEOUT_SECONDS)
        waiting = run_in_thread(lambda: bus.publish(text_message("last")))
        wait_for_publishers(bus, 1)
        assert calls == ["begins go"]
        may_continue.set()
        waiting.join()
        bus.wait_quiet()
        assert calls == [f"{prefix} {text}" for text in ("go", "more", "last") for prefix in BOTH]
    assert_no_threads_left()


def test_add_and_remove_inside_callback_leaves_nothing() -> None:
    handled = threading.Event()

    def add_and_remove(message: ModuleMessage) -> None:
        for _ in range(10):
            bus.remove_module(module)
            bus.add_module(module)
        bus.remove_module(module)
        handled.set()

    module = Listener(add_and_remove)
    with ModuleBus() as bus:
        bus.add_module(module)
        bus.publish(text_message("go"))
        assert handled.wait(TIMEOUT_SECONDS)
        assert_no_threads_left()
        assert bus.statistics().modules == ()
        bus.add_module(module := Listener())
        bus.publish(text_message("again"))
        assert module.wait(1) == ["again"]


def test_modules_can_remove_each_other() -> None:
    removed: list[Result] = []
    with ModuleBus() as bus:
        results_ = threading.Barrier(2)

        def remove(module: Listener) -> None:
            results_.wait(TIMEOUT_SECONDS)
            bus.remove_module(module)
            removed.append(Result.OK)

        first = Listener(lambda message: remove(second))
        second = Listener(lambda message: remove(first))
        bus.add_module(first)
        bus.add_module(second)
        bus.publish(text_message("go"))
        assert_no_threads_left()
        assert bus.statistics().modules == ()
    assert removed == [Result.OK] * 2
    assert_no_threads_left()


def test_remove_waits_for_callback() -> None:
    with ModuleBus() as bus:
        held_module = full_module(bus)
        leaving = run_in_thread(lambda: bus.remove_module(held_module))
        while bus.statistics().modules:
            pass
        assert leaving.is_running
        held_module.release()
        leaving.join()
        assert held_module.received == ["first"], "queued messages are dropped"


def test_remove_during_publish_leaves_no_messages() -> None:
    bus = ModuleBus()
    stop = threading.Event()

    def publish(bus: ModuleBus) -> None:
        while not stop.is_set():
            bus.publish(text_message("x"))

    joins = [run_in_thread(partial(publish, bus)) for _ in range(2)]
    freed = []
    for _ in range(50):
        module = Listener()
        bus.add_module(module, places=4)
        module.wait(1)
        bus.remove_module(module)
        count = len(module.received)
        freed.append(weakref.ref(module))
        assert count == len(module.received)
        del module
    stop.set()
    for each in joins:
        each.join()
    assert_no_threads_left()
    gc.collect()
    assert [ref for ref in freed if ref() is not None] == []
    bus.destroy()
    bus_ref = weakref.ref(bus)
    del bus, joins, each
    gc.collect()
    assert bus_ref() is None


def test_removal_drops_batch_of_worker() -> None:
    entered, may_continue = threading.Event(), [threading.Event(), threading.Event()]

    def hold_callback(message: ModuleMessage) -> None:
        number = int(message.content)
        if number < 2:
            entered.set()
            assert may_continue[number].wait(TIMEOUT_SECONDS)

    with ModuleBus() as bus:
        module = Listener(hold_callback)
        bus.add_module(module)
        bus.publish(text_message("0"))
        assert entered.wait(TIMEOUT_SECONDS)
        for number in range(1, 5):
            bus.publish(text_message(str(number)))
        may_continue[0].set()
        module.wait(2)  # The worker took the whole queue.
        bus.publish(text_message("5"))
        removing = run_in_thread(lambda: bus.remove_module(module))
        while bus.statistics().modules:
            pass
        may_continue[1].set()
        removing.join()
        assert module.received == ["0", "1"]
        assert bus.statistics().lost == 4


# References --------------------------------------------------------------------------------------


def test_last_reference_frees_bus() -> None:
    bus = ModuleBus()
    module = Listener()
    bus.add_module(module)
    bus.inc_ref()
    bus.destroy()
    bus.publish(text_message("still there"))
    module.wait(1)
    bus.dec_ref()
    assert bus.is_freed
    assert_no_threads_left()
    for call in (
        bus.inc_ref,
        bus.dec_ref,
        bus.destroy,
        bus.__enter__,
        lambda: bus.publish(text_message("x")),
        lambda: bus.publish_nowait(text_message("x")),
        lambda: bus.publish(b"no message"),
        lambda: bus.add_module(Listener()),
        lambda: bus.remove_module(module),
        lambda: bus.link(None, module),
    ):
        with pytest.raises(ModuleBusError, match=f"{bus.url} is freed") as raised:
            call()
        assert raised.value.result is Result.ERROR
    assert bus.statistics().references == 0


def test_with_block_releases_one_reference() -> None:
    with ModuleBus() as bus:
        bus.inc_ref()
    bus.publish(text_message("still there"))
    with bus:
        bus.destroy()
    assert bus.is_freed


@pytest.mark.parametrize(
    ("options", "expected_error"),
    [
        ({"places": 0}, "places must be 1 or more, got 0"),
        ({"places": "many"}, "got 'many'"),
        ({"full": "explode"}, "full must be one of block, drop_oldest, drop_newest"),
    ],
)
def test_reports_invalid_options(options: dict[str, object], expected_error: str) -> None:
    with ModuleBus() as bus:
        with pytest.raises(ModuleBusError, match=expected_error) as raised:
            bus.add_module(Listener(), **options)  # type: ignore[arg-type]
        assert raised.value.result is Result.INVALIDARG
        module = Listener()
        bus.add_module(module)
        for invalid, reason in (
            (module, "already"),
            (7, "can be called; got 7"),
            (None, "got None"),
        ):
            with pytest.raises(ModuleBusError, match=reason):
                bus.add_module(invalid)
        assert len(bus.statistics().modules) == 1
        assert "1 modules" in repr(bus)
