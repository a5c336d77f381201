"""Requirements of adding and removing modules.

A requirement about memory or sockets is tested by its meaning in Python.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from simplebus.gateway import ModuleBus, ModuleBusFullError, Result, result_codes
from tests.gateway.recording_modules import (
    TIMEOUT_SECONDS,
    HeldListener,
    Listener,
    assert_no_threads_left,
    run_in_thread,
    text_message,
)


def modules(bus: ModuleBus) -> list[object]:
    return [module for module, _ in bus.statistics().modules]


# AddModule


def test_99_013_without_a_bus_or_a_module_add_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.add_module(None, Listener()) is Result.INVALIDARG
    assert result_codes.add_module(bus, None) is Result.INVALIDARG


def test_13_107_add_stores_the_module(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    assert modules(bus) == [module]


def test_17_013_each_module_has_its_own_queue(bus: ModuleBus) -> None:
    held_module, other_module = HeldListener(), Listener()
    bus.add_module(held_module)
    bus.add_module(other_module)
    for number in range(5):
        bus.publish(text_message(str(number)))
    assert other_module.wait(5) == ["0", "1", "2", "3", "4"]
    held_module.wait_entered()
    held_module.release()
    assert held_module.wait(5) == other_module.received


def test_17_014_a_module_receives_all_messages_of_others(bus: ModuleBus) -> None:
    module, other_module = Listener(), Listener()
    bus.add_module(module)
    bus.add_module(other_module)
    for source in None, other_module, object():
        bus.publish(text_message("heard"), source=source)
    bus.publish(text_message("its own"), source=module)
    assert other_module.wait(3)[-1] == "its own"
    assert module.wait(3) == ["heard"] * 3


def test_13_099_a_lock_guards_each_queue(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module, places=3)
    threads = [
        run_in_thread(lambda: [bus.publish(text_message("x")) for _ in range(100)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.join()
    assert len(module.wait(300)) == 300


def test_17_020_quit_reaches_only_the_removed_module(bus: ModuleBus) -> None:
    first, second = Listener(), Listener()
    bus.add_module(first)
    bus.add_module(second)
    bus.remove_module(first)
    bus.publish(text_message("hello"))
    assert second.wait(1) == ["hello"]
    assert first.received == []


def test_13_102_each_module_has_its_own_thread(bus: ModuleBus) -> None:
    modules_ = [Listener(), Listener()]
    for module in modules_:
        bus.add_module(module)
    bus.publish(text_message("hello"))
    for module in modules_:
        module.wait(1)
    threads = modules_[0].threads | modules_[1].threads
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_13_039_a_module_can_be_added_during_publish(bus: ModuleBus) -> None:
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            bus.publish(text_message("x"))

    publishing = run_in_thread(publish)
    added_modules = [Listener() for _ in range(10)]
    for module in added_modules:
        bus.add_module(module)
        module.wait(1)
    stop.set()
    publishing.join()


def test_13_045_the_module_is_last_in_the_list(bus: ModuleBus) -> None:
    added_modules: list[object] = [Listener(), Listener(), Listener()]
    for module in added_modules:
        bus.add_module(module)
    assert modules(bus) == added_modules


def test_13_046_add_releases_the_lock(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    run_in_thread(lambda: bus.add_module(Listener())).join()
    assert result_codes.add_module(bus, module) is Result.INVALIDARG
    run_in_thread(lambda: bus.add_module(Listener())).join()
    assert len(modules(bus)) == 3


def test_13_047_add_returns_an_error_if_no_thread_can_start(
    bus: ModuleBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Listener()

    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert result_codes.add_module(bus, module) is Result.ERROR
        assert modules(bus) == []
        bus.publish(text_message("nobody hears it"))
    assert result_codes.add_module(bus, module) is Result.OK
    bus.publish(text_message("hello"))
    assert module.wait(1) == ["hello"]


def test_99_014_without_a_callback_add_is_invalidarg(bus: ModuleBus) -> None:
    class Mute:
        receive = None

    assert result_codes.add_module(bus, Mute()) is Result.INVALIDARG
    assert result_codes.add_module(bus, object()) is Result.INVALIDARG
    assert modules(bus) == []


def test_99_015_without_an_instance_add_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.add_module(bus, None) is Result.INVALIDARG
    assert modules(bus) == []


# RemoveModule


def test_13_048_without_a_bus_or_a_module_remove_is_invalidarg(bus: ModuleBus) -> None:
    assert result_codes.remove_module(None, Listener()) is Result.INVALIDARG
    assert result_codes.remove_module(bus, None) is Result.INVALIDARG


def test_13_088_one_of_several_concurrent_removals_succeeds(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    results: list[Result] = []
    threads = [
        run_in_thread(lambda: results.append(result_codes.remove_module(bus, module)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.join()
    assert sorted(results) == [Result.ERROR] * 3 + [Result.OK]


def test_13_049_modules_are_compared_by_identity(bus: ModuleBus) -> None:
    class Alike(Listener):
        def __eq__(self, other_module: object) -> bool:
            return True

    first, second = Alike(), Alike()
    bus.add_module(first)
    assert result_codes.remove_module(bus, second) is Result.ERROR
    assert result_codes.add_module(bus, second) is Result.OK
    assert result_codes.remove_module(bus, first) is Result.OK
    bus.publish(text_message("hello"))
    assert second.wait(1) == ["hello"]


def test_13_050_removing_an_absent_module_returns_an_error_and_releases_the_lock(
    bus: ModuleBus,
) -> None:
    assert result_codes.remove_module(bus, Listener()) is Result.ERROR
    run_in_thread(lambda: bus.publish(text_message("x"))).join()


def test_13_052_remove_deletes_the_module_from_the_list(bus: ModuleBus) -> None:
    first, second, third = Listener(), Listener(), Listener()
    for module in first, second, third:
        bus.add_module(module)
    bus.remove_module(second)
    assert modules(bus) == [first, third]


def test_13_054_the_lock_is_released_before_waiting_for_the_callback(bus: ModuleBus) -> None:
    held_module, other_module = HeldListener(), Listener()
    bus.add_module(held_module)
    bus.add_module(other_module)
    bus.publish(text_message("one"))
    held_module.wait_entered()
    removing = run_in_thread(lambda: bus.remove_module(held_module))
    while held_module in modules(bus):
        pass
    bus.publish(text_message("two"))
    assert other_module.wait(2) == ["one", "two"]
    assert removing.is_running
    held_module.release()
    removing.join()


def test_17_021_quit_wakes_a_waiting_worker(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    bus.remove_module(module)
    assert_no_threads_left()


def full(bus: ModuleBus) -> HeldListener:
    held_module = HeldListener()
    bus.add_module(held_module, places=1)
    bus.publish(text_message("one"))
    held_module.wait_entered()
    bus.publish(text_message("two"))
    return held_module


def test_02_001_the_queue_closes_during_concurrent_publish(bus: ModuleBus) -> None:
    held_module = full(bus)
    publishing = run_in_thread(lambda: bus.publish(text_message("three")))
    while not bus.statistics().waiting:
        pass
    removing = run_in_thread(lambda: bus.remove_module(held_module))
    publishing.join()
    held_module.release()
    removing.join()


def test_17_015_queued_messages_of_a_removed_module_are_dropped(bus: ModuleBus) -> None:
    held_module = full(bus)
    removing = run_in_thread(lambda: bus.remove_module(held_module))
    while modules(bus):
        pass
    held_module.release()
    removing.join()
    assert held_module.received == ["one"]
    assert bus.statistics().lost == 1


def test_02_003_publish_continues_after_the_queue_is_closed(bus: ModuleBus) -> None:
    held_module = full(bus)
    with pytest.raises(ModuleBusFullError):
        bus.publish_nowait(text_message("three"))
    removing = run_in_thread(lambda: bus.remove_module(held_module))
    while modules(bus):
        pass
    bus.publish_nowait(text_message("three"))
    held_module.release()
    removing.join()


def test_13_104_remove_waits_for_the_thread(bus: ModuleBus) -> None:
    held_module = HeldListener()
    bus.add_module(held_module)
    bus.publish(text_message("one"))
    held_module.wait_entered()
    removing = run_in_thread(lambda: bus.remove_module(held_module))
    while modules(bus):
        pass
    assert removing.is_running
    held_module.release()
    removing.join()
    assert_no_threads_left()


def test_13_057_remove_frees_the_module(bus: ModuleBus) -> None:
    module, other_module = Listener(), Listener()
    bus.add_module(module)
    bus.add_module(other_module, hears_all=False)
    bus.link(module, other_module)
    bus.publish(text_message("one"), source=module)
    bus.publish(text_message("two"))
    module.wait(1)
    (thread,) = (each for each in threading.enumerate() if each.ident in module.threads)
    freed = weakref.ref(module)
    bus.remove_module(module)
    thread.join(TIMEOUT_SECONDS)
    del module
    gc.collect()
    assert freed() is None


def test_13_053_second_remove_returns_an_error(bus: ModuleBus) -> None:
    module = Listener()
    bus.add_module(module)
    assert result_codes.remove_module(bus, module) is Result.OK
    assert result_codes.remove_module(bus, module) is Result.ERROR
    bus.destroy()
    assert result_codes.remove_module(bus, module) is Result.ERROR
