"""Simplebus programs timed by sdk.py and single_messages.py, written as a user would write them.

    python -m load.sdk_worker JOB

The timed side loops over single messages if the claim is about messages; the other side uses
batches. A message counts when its publisher has the confirmation and its ack has been applied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import anyio
import msgspec

import simplebus
from load.brokers import HOST
from load.sdk_job import (
    CLASS,
    TYPED_CLASS,
    Job,
    OneWayTimes,
    fail_mismatch,
    latency_figures,
    now,
    print_ready,
    print_result,
    stamped,
)

Found = dict[str, float]
PUBLISHED_TOGETHER = 1_000
KINDS = 4_096


@simplebus.message(class_id=TYPED_CLASS)
class Reading(msgspec.Struct):
    """Typed message of the comparison."""

    meter: int
    place: str
    value: float


READINGS = [Reading(n, f"hall {n % 7}", n / 8) for n in range(KINDS)]


def readings(job: Job) -> Iterator[Reading]:
    return itertools.islice(itertools.cycle(READINGS), job.count)


def encoded_readings(job: Job) -> Iterator[bytes]:
    encoded = [msgspec.json.encode(reading) for reading in READINGS]
    return itertools.islice(itertools.cycle(encoded), job.count)


# Publishing --------------------------------------------------------------------------------------


async def publish(bus: simplebus.Bus, job: Job) -> Found:
    """Publish in a loop and wait for all confirms at its end."""
    payloads = job.payloads()
    started = now()
    for payload in payloads:
        await bus.publish(payload, class_id=CLASS, confirm=False)
    await bus.flush()
    return {"started": started, "confirmed": now()}


async def publish_batches(bus: simplebus.Bus, job: Job) -> Found:
    """Publish in batches and wait for all confirms at the end."""
    payloads = job.payloads()
    started = now()
    while payloads_of_batch := list(itertools.islice(payloads, PUBLISHED_TOGETHER)):
        await bus.publish_many(payloads_of_batch, class_id=CLASS, confirm=False)
    await bus.flush()
    return {"started": started, "confirmed": now()}


async def publish_each(bus: simplebus.Bus, job: Job) -> Found:
    """Publish each message after the confirm of the previous one."""
    payloads = job.payloads()
    started = now()
    for payload in payloads:
        await bus.publish(payload, class_id=CLASS)
    return {"started": started, "confirmed": now()}


async def publish_in_flight(bus: simplebus.Bus, job: Job) -> Found:
    """Publish from many tasks, each of which waits for its confirms."""
    payloads = job.payloads()

    async def publish_rest() -> None:
        for payload in payloads:
            await bus.publish(payload, class_id=CLASS)

    started = now()
    async with anyio.create_task_group() as tasks:
        for _ in range(job.in_flight):
            tasks.start_soon(publish_rest)
    return {"started": started, "confirmed": now()}


async def publish_paced(bus: simplebus.Bus, job: Job) -> Found:
    """Publish stamped messages at an even pace."""
    started = now()
    for number in range(job.count):
        await anyio.sleep(job.seconds_until(number, started))
        await bus.publish(stamped(number), class_id=CLASS, confirm=False)
    await bus.flush()
    return {"started": started, "confirmed": now()}


async def publish_typed(bus: simplebus.Bus, job: Job) -> Found:
    started = now()
    for reading in readings(job):
        await bus.publish(reading, confirm=False)
    await bus.flush()
    return {"started": started, "confirmed": now()}


async def publish_encoded(bus: simplebus.Bus, job: Job) -> Found:
    """Publish the encoded messages that `receive_typed` expects, in batches."""
    payloads = encoded_readings(job)
    started = now()
    while payloads_of_batch := list(itertools.islice(payloads, PUBLISHED_TOGETHER)):
        await bus.publish_many(payloads_of_batch, class_id=TYPED_CLASS, confirm=False)
    await bus.flush()
    return {"started": started, "confirmed": now()}


# Receiving ---------------------------------------------------------------------------------------


async def receive(bus: simplebus.Bus, job: Job) -> Found:
    payloads = job.payloads()
    async with bus.subscribe(CLASS) as messages:
        print_ready()
        expected = next(payloads)
        async for message in messages:
            if message.payload != expected:
                fail_mismatch(message, expected)
            expected = next(payloads, b"")
            if not expected:
                break
    return await settled(bus)


async def receive_paced(bus: simplebus.Bus, job: Job) -> Found:
    times = OneWayTimes(job.count)
    async with bus.subscribe(CLASS) as messages:
        print_ready()
        async for message in messages:
            times.add(message.payload)
            if times.is_complete:
                break
    return await settled(bus) | times.compute_percentiles()


async def receive_typed(bus: simplebus.Bus, job: Job) -> Found:
    expected_readings = readings(job)
    async with bus.subscribe(Reading) as values:
        print_ready()
        expected: Reading | None = next(expected_readings)
        async for reading in values:
            if reading != expected:
                fail_mismatch(reading, expected)
            expected = next(expected_readings, None)
            if expected is None:
                break
    return await settled(bus)


async def receive_batches(bus: simplebus.Bus, job: Job) -> Found:
    return await verify_batches(bus, CLASS, job.count, job.payloads())


async def receive_encoded(bus: simplebus.Bus, job: Job) -> Found:
    """Receive the messages of `publish_typed` in batches and verify their payloads."""
    return await verify_batches(bus, TYPED_CLASS, job.count, encoded_readings(job))


async def verify_batches(
    bus: simplebus.Bus, class_id: int, count: int, expected: Iterator[bytes]
) -> Found:
    async with bus.subscribe(class_id) as messages:
        print_ready()
        async for batch in messages.batches():
            payloads = batch.payloads
            expected_payloads = list(itertools.islice(expected, len(payloads)))
            if payloads != expected_payloads:
                fail_mismatch(payloads, expected_payloads)
            count -= len(payloads)
            if count == 0:
                break
    return await settled(bus)


async def settled(bus: simplebus.Bus) -> Found:
    await bus.drain()  # Then the last acknowledgement is applied.
    return {"settled": now()}


# Requests -----------------------------------------------------------------------------------------


async def ask(bus: simplebus.Bus, job: Job) -> Found:
    """Send requests with one in flight."""
    seconds = []
    for payload in job.payloads():
        started_at = now()
        reply = await bus.request(payload, class_id=CLASS)
        seconds.append(now() - started_at)
        if reply.payload != payload:
            fail_mismatch(reply, payload)
    return latency_figures(seconds)


async def answer(bus: simplebus.Bus, job: Job) -> Found:
    """Reply to requests until the process is stopped."""

    async def reply(message: simplebus.Message[bytes]) -> bytes:
        return message.payload

    bus.handle(CLASS, reply)
    await bus.drain()
    print_ready()
    await anyio.sleep_forever()
    return {}


ROLES: dict[str, Callable[[simplebus.Bus, Job], Coroutine[Any, Any, Found]]] = {
    role.__name__: role
    for role in (
        publish,
        publish_batches,
        publish_each,
        publish_in_flight,
        publish_paced,
        publish_typed,
        publish_encoded,
        receive,
        receive_paced,
        receive_typed,
        receive_batches,
        receive_encoded,
        ask,
        answer,
    )
}


async def run(job: Job) -> Found:
    async with simplebus.connect(f"simplebus://{HOST}:{job.port}") as bus:
        return await ROLES[job.role](bus, job)


def publish_each_blocking(job: Job) -> Found:
    """Publish by the blocking client, each message after the confirm of the previous one."""
    with simplebus.connect_blocking(f"simplebus://{HOST}:{job.port}") as bus:
        payloads = job.payloads()
        started = now()
        for payload in payloads:
            bus.publish(payload, class_id=CLASS)
        return {"started": started, "confirmed": now()}


if __name__ == "__main__":
    job = Job.from_arguments()
    if job.role == publish_each_blocking.__name__:
        print_result(publish_each_blocking(job))
    else:
        print_result(anyio.run(run, job, backend=job.backend))
