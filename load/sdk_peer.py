"""Programs of the SDK comparison for nats-py, core and JetStream, in its fastest form.

    python -m load.sdk_peer JOB

Subscriptions use callbacks: `async for message in subscription.messages` creates a task per message
and is three times as slow. Pending limits are disabled, so no message is dropped. The JetStream
publisher uses the default limit of unconfirmed messages; its subscriber is a push consumer that
acks each message. A higher limit, a task per publish, and fetching are slower. With few messages
in flight, as many tasks that each wait for their PubAcks are twice as fast as `publish_async`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from load.brokers import HOST
from load.jetstream import STREAM
from load.sdk_job import (
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
SUBJECT = "load.1"
JET_SUBJECT = "load.js.1"
NO_LIMIT = 0
ACKS_PENDING = 20_000
REQUEST_S = 10.0
CHECKS, CHECK_S = 100, 0.01  # Requests for the number of unacknowledged messages.


# Publishing --------------------------------------------------------------------------------------


async def publish(client: Client, job: Job) -> Found:
    payloads = job.payloads()
    started = now()
    for payload in payloads:
        await client.publish(SUBJECT, payload)
    await client.flush()
    return {"started": started, "confirmed": now()}


async def jet_publish(client: Client, job: Job) -> Found:
    stream = client.jetstream()
    payloads = job.payloads()
    started = now()
    confirms = [await stream.publish_async(JET_SUBJECT, payload) for payload in payloads]
    await stream.publish_async_completed()
    confirmed = now()
    for n, confirm in enumerate(confirms):
        if confirm.result().seq != n + 1:
            fail_mismatch(confirm, f"sequence {n + 1}")
    return {"started": started, "confirmed": confirmed}


async def jet_publish_each(client: Client, job: Job) -> Found:
    stream = client.jetstream()
    payloads = job.payloads()
    started = now()
    for payload in payloads:
        await stream.publish(JET_SUBJECT, payload)
    return {"started": started, "confirmed": now()}


async def jet_publish_in_flight(client: Client, job: Job) -> Found:
    stream = client.jetstream()
    payloads = job.payloads()

    async def publish_rest() -> None:
        for payload in payloads:
            await stream.publish(JET_SUBJECT, payload)

    started = now()
    await asyncio.gather(*(publish_rest() for _ in range(job.in_flight)))
    return {"started": started, "confirmed": now()}


async def publish_paced(client: Client, job: Job) -> Found:
    started = now()
    for number in range(job.count):
        await asyncio.sleep(job.seconds_until(number, started))
        await client.publish(SUBJECT, stamped(number))
    await client.flush()
    return {"started": started, "confirmed": now()}


# Receiving ---------------------------------------------------------------------------------------


class Receiver:
    """Verify that messages arrive in order; with `acks`, acknowledge each."""

    def __init__(self, job: Job, *, acks: bool = False) -> None:
        self.completed = asyncio.Event()
        self._payloads = job.payloads()
        self._expected = next(self._payloads)
        self._acks = acks

    async def check_message(self, message: Msg) -> None:
        if message.data != self._expected:
            fail_mismatch(message, self._expected)
        if self._acks:
            await message.ack()
        self._expected = next(self._payloads, b"")
        if not self._expected:
            self.completed.set()


async def receive(client: Client, job: Job) -> Found:
    receiver = Receiver(job)
    await client.subscribe(
        SUBJECT,
        cb=receiver.check_message,
        pending_msgs_limit=NO_LIMIT,
        pending_bytes_limit=NO_LIMIT,
    )
    await client.flush()
    print_ready()
    await receiver.completed.wait()
    return {"settled": now()}


async def receive_paced(client: Client, job: Job) -> Found:
    times, completed = OneWayTimes(job.count), asyncio.Event()

    async def add(message: Msg) -> None:
        times.add(message.data)
        if times.is_complete:
            completed.set()

    await client.subscribe(
        SUBJECT, cb=add, pending_msgs_limit=NO_LIMIT, pending_bytes_limit=NO_LIMIT
    )
    await client.flush()
    print_ready()
    await completed.wait()
    return {"settled": now()} | times.compute_percentiles()


async def jet_receive(client: Client, job: Job) -> Found:
    receiver = Receiver(job, acks=True)
    subscription = await client.jetstream().subscribe(
        JET_SUBJECT,
        stream=STREAM,
        cb=receiver.check_message,
        manual_ack=True,
        config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=ACKS_PENDING),
        pending_msgs_limit=NO_LIMIT,
        pending_bytes_limit=NO_LIMIT,
    )
    print_ready()
    await receiver.completed.wait()
    await client.flush()  # The server has received the acknowledgements.
    settled = now()
    for _ in range(CHECKS):
        pending = (await subscription.consumer_info()).num_ack_pending
        if not pending:
            break
        await asyncio.sleep(CHECK_S)
    else:
        fail_mismatch(f"{pending} unacknowledged messages", "none")
    return {"settled": settled}


# Requests -----------------------------------------------------------------------------------------


async def ask(client: Client, job: Job) -> Found:
    seconds = []
    for payload in job.payloads():
        started_at = now()
        reply = await client.request(SUBJECT, payload, timeout=REQUEST_S)
        seconds.append(now() - started_at)
        if reply.data != payload:
            fail_mismatch(reply, payload)
    return latency_figures(seconds)


async def answer(client: Client, job: Job) -> Found:
    """Reply to requests until the process is stopped."""

    async def reply(message: Msg) -> None:
        await message.respond(message.data)

    await client.subscribe(SUBJECT, cb=reply)
    await client.flush()
    print_ready()
    await asyncio.Event().wait()
    return {}


ROLES: dict[str, Callable[[Client, Job], Coroutine[Any, Any, Found]]] = {
    role.__name__: role
    for role in (
        publish,
        publish_paced,
        jet_publish,
        jet_publish_each,
        jet_publish_in_flight,
        receive,
        receive_paced,
        jet_receive,
        ask,
        answer,
    )
}


async def run(job: Job) -> Found:
    client = await nats.connect(f"nats://{HOST}:{job.port}")
    try:
        return await ROLES[job.role](client, job)
    finally:
        await client.close()


if __name__ == "__main__":
    job = Job.from_arguments()
    print_result(asyncio.run(run(job)))
