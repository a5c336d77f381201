"""Requirements of the bus: creation, references, publishing, and destruction.

A requirement about memory or sockets is tested by its meaning in Python.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest

from simplebus.gateway import ModuleBus, ModuleMessage, Result, result_codes
from tests.gateway.recording_modules import (
    TIMEOUT_SECONDS,
    HeldListener,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)

# Create


def test_13_001_create_returns_a_new_bus() -> None:
    bus = result_codes.create()
    assert isinstance(bus, ModuleBus)
    assert bus is not result_codes.create()


def test_13_003_create_returns_none_if_the_platform_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise MemoryError("on purpose")

    monkeypatch.setattr("simplebus.gateway.routing.threading.Lock", fail)
    assert result_codes.create() is None


def test_13_067_each_bus_has_its_own_data() -> None:
    first, second = ModuleBus(), ModuleBus()
    received = Listener()
    first.add_module(received)
    second.publish(text_message("elsewhere"))
    first.publish(text_message("here"))
    assert received.wait(1) == ["here"]
    first.destroy()
    assert not second.is_freed


def test_13_007_a_new_bus_has_no_modules(bus: ModuleBus) -> None:
    assert bus.statistics().modules == ()


def test_13_023_a_lock_guards_the_modules(bus: ModuleBus) -> None:
    def add_and_remove() -> None:
        for _ in range(20):
            module = Listener()
            bus.add_module(module)
            bus.remove_module(module)

    threads = [run_in_thread(add_and_remove) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert bus.statistics().modules == ()


def test_17_001_publish_works_on_a_new_bus(bus: ModuleBus) -> None:
    assert result_codes.publish(bus, None, text_message("nobody hears it")) is Result.OK
    assert bus.statistics().published == 1


def test_17_002_ids_are_unique() -> None:
    assert len({ModuleBus().id for _ in range(1000)}) == 1000


def test_17_003_the_url_contains_the_id(bus: ModuleBus) -> None:
    assert bus.url == "inproc://" + bus.id


def test_17_004_the_url_identifies_the_bus(bus: ModuleBus) -> None:
    assert bus.url in repr(bus)


# IncRef


def test_13_108_without_a_bus_inc_ref_does_nothing() -> None:
    result_codes.inc_ref(None)


def test_13_109_inc_ref_increments_the_count(bus: ModuleBus) -> None:
    result_codes.inc_ref(bus)
    assert bus.statistics().references == 2
    result_codes.destroy(bus)
    assert result_codes.publish(bus, None, text_message("still there")) is Result.OK


# Publish


def test_13_030_without_a_bus_or_a_message_publish_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.publish(None, None, text_message("x")) is Result.INVALIDARG
    assert result_codes.publish(bus, None, None) is Result.INVALIDARG
    assert result_codes.publish(bus, None, "text") is Result.INVALIDARG  # type: ignore[arg-type]
    assert result_codes.publish(bus, None, text_message("x")) is Result.OK


def test_17_022_concurrent_messages_have_one_order_for_all_modules(bus: ModuleBus) -> None:
    first, second = Listener(), Listener()
    bus.add_module(first)
    bus.add_module(second)

    def publish(name: str) -> None:
        for number in range(100):
            bus.publish(text_message(f"{name}{number}"))

    threads = [run_in_thread(lambda name=name: publish(name)) for name in "ab"]  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert first.wait(200) == second.wait(200)


def test_17_007_messages_are_delivered_unchanged(bus: ModuleBus) -> None:
    received: list[ModuleMessage] = []
    listener = Listener(received.append)
    bus.add_module(listener)
    content, properties = bytearray(b"one"), {"a": "1"}
    bus.publish(ModuleMessage(content, properties))
    content[:] = b"two"
    properties["a"] = "2"
    bus.publish(text_message("end"))
    listener.wait(2)
    assert received[0] == ModuleMessage(b"one", {"a": "1"})


def test_17_008_a_message_has_a_byte_form() -> None:
    message = ModuleMessage(b"21.5", {"sensor": "roof"})
    assert ModuleMessage.from_bytes(message.to_bytes()) == message


def test_17_009_the_byte_form_is_a_copy(bus: ModuleBus) -> None:
    data = bytearray(text_message("one").to_bytes())
    message = ModuleMessage.from_bytes(data)
    data[-1:] = b"x"
    assert message.content == b"one"


def test_17_010_a_message_reaches_all_modules(bus: ModuleBus) -> None:
    modules = [Listener() for _ in range(3)]
    for module in modules:
        bus.add_module(module)
    bus.publish(text_message("hello"))
    assert [module.wait(1) for module in modules] == [["hello"]] * 3


def test_17_011_published_bytes_are_released() -> None:
    data = text_message("one").to_bytes()
    references_before = sys.getrefcount(data)
    with ModuleBus() as bus:
        listener = HeldListener()
        bus.add_module(listener)
        bus.publish(data)
        assert sys.getrefcount(data) == references_before, "already before their delivery"
        listener.release()
        assert listener.wait(1) == ["one"]


def test_17_012_a_published_message_is_released() -> None:
    content = bytes(range(33, 99))
    references_before = sys.getrefcount(content)
    with ModuleBus() as bus:
        listener = HeldListener()
        bus.add_module(listener)
        bus.publish(ModuleMessage(content))
        listener.wait_entered()
        bus.publish(ModuleMessage(content))
        assert sys.getrefcount(content) == references_before + 2, (
            "one message is being processed, and one is queued"
        )
        listener.release()
        listener.wait(2)
        bus.wait_quiet()
        assert sys.getrefcount(content) == references_before


def test_17_023_publish_releases_the_lock(bus: ModuleBus) -> None:
    bus.publish(text_message("one"))
    run_in_thread(lambda: bus.publish(text_message("two"))).join()
    assert result_codes.publish(bus, None, b"malformed") is Result.OK
    run_in_thread(lambda: bus.publish(text_message("three"))).join()
    assert bus.statistics().published == 3


def test_13_037_failed_publish_returns_an_error() -> None:
    bus = ModuleBus()
    assert result_codes.publish(bus, None, text_message("x")) is Result.OK
    bus.destroy()
    assert result_codes.publish(bus, None, text_message("x")) is Result.ERROR
    bus, results, is_done = ModuleBus(), [], threading.Event()

    def flood(message: ModuleMessage) -> None:
        if message.content == b"go":
            results.extend(result_codes.publish(bus, None, text_message("more")) for _ in range(3))
            is_done.set()

    with bus:
        bus.add_module(flood, places=2)
        bus.publish(text_message("go"))
        assert is_done.wait(TIMEOUT_SECONDS)
    assert results == [Result.OK, Result.OK, Result.ERROR], "the queue is full and stays full"


# Destroy, DecRef


def test_13_058_without_a_bus_destroy_does_nothing() -> None:
    result_codes.destroy(None)


def test_13_111_destroy_decrements_the_count(bus: ModuleBus) -> None:
    bus.inc_ref()
    bus.inc_ref()
    result_codes.destroy(bus)
    assert bus.statistics().references == 2
    result_codes.destroy(bus)
    assert bus.statistics().references == 1


def test_13_112_the_bus_is_freed_at_count_zero() -> None:
    bus = ModuleBus()
    held_module = HeldListener()
    bus.add_module(held_module)
    bus.publish(text_message("one"))
    held_module.wait_entered()
    held_module.release()
    freed = weakref.ref(held_module)
    bus.destroy()
    assert bus.is_freed
    assert bus.statistics().modules == ()
    assert_no_threads_left()
    del held_module
    gc.collect()
    assert freed() is None


def test_13_113_dec_ref_equals_destroy() -> None:
    result_codes.dec_ref(None)
    bus = ModuleBus()
    bus.add_module(Listener())
    bus.inc_ref()
    result_codes.dec_ref(bus)
    assert not bus.is_freed
    result_codes.dec_ref(bus)
    assert bus.is_freed
    assert_no_threads_left()
