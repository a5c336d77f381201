"""Copier: copies one class from a source to a target until it is cancelled.

The copier stores nothing itself. After a lost connection it reads its position from both ends, so a
broken connection and a killed process are handled alike. Only a few batches are in flight or
prepared, so memory is bounded and a slow or absent target makes messages wait at the source.
Skipped messages are counted by reason. Messages that the target refuses become dead letters of the
source before the copier moves on.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np
import trio

from simplebus.bridge.interfaces import (
    STREAM_FULL,
    FatalConfigurationError,
    MessageSource,
    MessageTarget,
    Refusal,
    SourceBatch,
    TakenOverError,
    TargetBatch,
)
from simplebus.bridge.source.lag import Lag, OpenSource
from simplebus.bridge.transform import SkipReason
from simplebus.core.errors import BusError, RefusedError
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.bridge")

RETRY_DELAY_MIN_SECONDS = 0.05
RETRY_DELAY_MAX_SECONDS = 5.0
YIELD_TO_OTHER_BRIDGE_MAX_SECONDS = 60.0
"""Longest delay before a copier reconnects after another bridge with the same name took over.

Without the delay the two would take the connection from each other all the time. The first delay is
a twelfth of this; it doubles each time.
"""
_TAKEN_OVER_AGAIN_SECONDS = 10.0
"""A copier that is taken over twice within this time has a running duplicate."""
_RETRYABLE_REFUSALS = {
    "disk_full",
    "disk_failed",
    "drop_newest",
    STREAM_FULL,
}
"""Refusal codes that do not depend on the message: the copier sends it again."""
_RESEND_DELAY_SECONDS = 1.0
_CLOSE_TIMEOUT_SECONDS = 1.0
_STALL_CHECK_SECONDS = 1.0
STALLED_SECONDS = 10.0
"""Time for which the target accepts no available message until a copier counts as stalled."""


@dataclass(frozen=True, slots=True)
class CopierStatistics:
    """Counters and state of a copier at one moment."""

    name: str
    is_up: bool
    """True if both ends are connected and the copier is not stalled."""
    problem: str
    """Reason why the copier is down or stalled; empty if it runs or the reason is unknown."""
    copied: int
    """Messages that the target confirmed."""
    batches: int
    skipped: dict[str, int]
    """Skipped messages, by reason."""
    refused: int
    """Messages that the target refused for good. They are dead letters."""
    missed: int
    """Messages that the source had dropped before they were copied."""
    altered: int
    """NATS messages that a bus cannot represent exactly. The first one is logged."""
    lag: int | None
    """Source messages that the target has not confirmed; None if unknown.

    A copier with a channel filter counts other messages until it has read them.
    """
    lag_seconds: float
    """Age of the oldest of these messages, from when the source accepted it (core NATS: when it
    arrived); 0 without lag."""
    position: int
    """Source sequence after the last message that was copied, skipped or dead-lettered."""
    losses: int
    """Connection losses and failed attempts to connect, at either end."""
    discarded_records: int
    """Bridge records at the target that were discarded because one end has changed.

    Messages may be stored twice after that.
    """


@dataclass(frozen=True, slots=True)
class SourceAndTarget:
    """Connected source and target of a copier."""

    source: MessageSource
    target: MessageTarget
    start_sequence: int
    """Sequence at which copying starts."""
    refusals: list[Refusal]
    """Refusals of messages that an earlier connection sent."""
    discarded_records: int = 0


SourceOpened = Callable[[MessageSource, int], object]
"""Callback for an opened source, with the position that the source stores."""
OpenSourceAndTarget = Callable[[SourceOpened], AbstractAsyncContextManager[SourceAndTarget]]


@dataclass(frozen=True, slots=True)
class CopierConnector:
    """Functions that connect a copier to its source and target."""

    open: OpenSourceAndTarget
    open_source: OpenSource | None = None
    """Connects to the source alone; None if the source stores nothing for an absent copier."""


class Copier:
    """Copies one class in one direction. Start `run` in a nursery; cancelling it loses nothing."""

    def __init__(
        self,
        name: str,
        connector: CopierConnector,
        *,
        random_fraction: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self._connector = connector
        self._random_fraction = random_fraction
        self._is_up = False
        self._problem = ""
        self._logged_problem = ""
        """Problem that was logged last, or empty since copying works again."""
        self._stall_reason = ""
        self._resend_reason = ""
        """Reason why the current messages are sent again; empty if they are not."""
        self._copied = self._batches = self._refused = self._missed = self._losses = 0
        self._discarded_records = self._altered = 0
        self._skipped: Counter[SkipReason] = Counter()
        self._position = self._head = 0
        self._storage_id = ""
        """Storage of the source to which the sequences belong."""
        self._cursor = 0
        """Next sequence to read. Messages from `_position` to here are in flight or planned."""
        self._lag = Lag(connector.open_source)
        self._yield_seconds = 0.0
        """Current delay after a takeover by another bridge with the same name."""
        self._taken_over_at = -math.inf

    def statistics(self) -> CopierStatistics:
        return CopierStatistics(
            name=self.name,
            is_up=self._is_up and not self._stall_reason,
            problem=self._problem or self._stall_reason,
            copied=self._copied,
            batches=self._batches,
            skipped={reason.value: count for reason, count in self._skipped.items()},
            refused=self._refused,
            missed=self._missed,
            altered=self._altered,
            lag=self._lag.count,
            lag_seconds=self._lag.seconds,
            position=self._position,
            losses=self._losses,
            discarded_records=self._discarded_records,
        )

    async def run(self) -> None:
        """Copy until cancelled, or log a fatal configuration error and return."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._lag.poll_while_connected)
            nursery.start_soon(self._watch_for_stall)
            await self._run_with_retries()
            nursery.cancel_scope.cancel()

    async def _run_with_retries(self) -> None:
        # From now on the source keeps new messages, even while the target is away.
        await self._lag.poll_source(self._storage_id, self._position)
        failed_attempts = 0
        while True:
            batches_before, yield_seconds = self._batches, 0.0
            try:
                async with self._connector.open(self._lag.set_source) as source_and_target:
                    self._on_connected(source_and_target)
                    await self._copy(source_and_target)
            except FatalConfigurationError as error:
                self._losses += 1
                self._problem = str(error)
                log.error(
                    "copier.stopped", "{copier}: {error}", copier=self.name, error=self._problem
                )
                self._lag.clear()
                return
            except TakenOverError as error:
                self._yield_to_other_bridge(error)
                yield_seconds = self._yield_seconds
            except (BusError, OSError) as error:
                self._note_connection_loss(error)
            except Exception as error:  # Must not end the server, nor other copiers.
                log.exception("copier.failed", "{copier}: internal error", copier=self.name)
                self._note_connection_loss(error)
            finally:
                self._is_up, self._resend_reason = False, ""
                self._lag.connection_lost()
            failed_attempts = 0 if self._batches > batches_before else failed_attempts + 1
            delay = RETRY_DELAY_MIN_SECONDS * 2.0 ** min(failed_attempts, 16)
            delay = max(min(delay, RETRY_DELAY_MAX_SECONDS), yield_seconds)
            retry_at = trio.current_time() + delay * (1 - self._random_fraction() / 2)
            if failed_attempts > 1:
                await self._lag.poll_source(self._storage_id, self._position)
            await trio.sleep_until(retry_at)

    def _yield_to_other_bridge(self, error: TakenOverError) -> None:
        """Wait longer before the next attempt, because a bridge with the same name took over.

        The first takeover may be this copier's own: a server that was stopped can report late that
        the new connection replaced the old one. Two takeovers in a row mean that a duplicate runs.
        The duplicate is logged once.
        """
        now = trio.current_time()
        # While two copiers yield to each other, a takeover may occur only after this time.
        repeat_seconds = _TAKEN_OVER_AGAIN_SECONDS
        if self._yield_seconds:
            repeat_seconds = 3 * YIELD_TO_OTHER_BRIDGE_MAX_SECONDS
        is_repeated, self._taken_over_at = now - self._taken_over_at <= repeat_seconds, now
        if not is_repeated:
            self._yield_seconds = 0.0
            self._note_connection_loss(error)
            return
        self._losses += 1
        self._problem = (
            "another bridge with this name took over the connection; this one waits and retries: "
            f"stop one of the two, or give each its own name ({error})"
        )
        if not self._yield_seconds:
            log.error(
                "copier.taken_over", "{copier}: {error}", copier=self.name, error=self._problem
            )
        self._yield_seconds = min(
            2 * self._yield_seconds or YIELD_TO_OTHER_BRIDGE_MAX_SECONDS / 12,
            YIELD_TO_OTHER_BRIDGE_MAX_SECONDS,
        )

    def _on_connected(self, source_and_target: SourceAndTarget) -> None:
        refused = [refusal.sequence for refusal in source_and_target.refusals]
        self._is_up, self._position = True, min([source_and_target.start_sequence, *refused])
        self._storage_id = source_and_target.source.storage_id
        self._discarded_records += source_and_target.discarded_records
        self._head = max(self._head, source_and_target.start_sequence)
        self._problem = ""
        log.info(
            "copier.started",
            "{copier}: copying from sequence {sequence}",
            copier=self.name,
            sequence=source_and_target.start_sequence,
        )

    def _clear_problem(self) -> None:
        """Log that copying works again, if a problem was logged."""
        if self._logged_problem:
            log.warning("copier.recovered", "{copier}: copying again", copier=self.name)
        self._logged_problem = ""

    def _note_connection_loss(self, error: Exception) -> None:
        self._losses += 1
        self._problem = str(error) or type(error).__name__
        if self._logged_problem != self._problem:
            self._logged_problem = self._problem
            log.warning(
                "copier.connection_lost",
                "{copier}: {error}; retrying",
                copier=self.name,
                error=self._problem,
            )

    async def _watch_for_stall(self) -> None:
        """Detect a target that accepts nothing. A full target may send no answer at all."""
        progress, unchanged_checks = self._progress, 0
        while True:
            await trio.sleep(_STALL_CHECK_SECONDS)
            previous, progress = progress, self._progress
            is_unchanged = self._is_up and self._lag.unsettled_count > 0 and progress == previous
            unchanged_checks = unchanged_checks + 1 if is_unchanged else 0
            previous_reason, self._stall_reason = self._stall_reason, ""
            if unchanged_checks * _STALL_CHECK_SECONDS >= STALLED_SECONDS:
                self._stall_reason = f"the target accepted no message for {STALLED_SECONDS:g} s"
                self._stall_reason += f": {self._resend_reason}" if self._resend_reason else ""
            if self._stall_reason and not previous_reason:
                log.warning(
                    "target.stalled",
                    "{copier}: {reason}",
                    copier=self.name,
                    reason=self._stall_reason,
                )
            elif previous_reason and not self._stall_reason and self._is_up:
                log.warning(
                    "target.recovered",
                    "{copier}: the target accepts messages again",
                    copier=self.name,
                )

    @property
    def _progress(self) -> tuple[int, ...]:
        """Counters that change whenever a message is copied, refused, skipped or confirmed."""
        target = self._lag.target
        confirmed = 0 if target is None or self._resend_reason else target.confirmed_count
        return self._copied, self._refused, self._skipped.total(), confirmed

    # Copying -------------------------------------------------------------------------------------

    async def _copy(self, source_and_target: SourceAndTarget) -> None:
        source, target, start = (
            source_and_target.source,
            source_and_target.target,
            source_and_target.start_sequence,
        )
        self._lag.set_source(source, start)
        self._lag.target = target
        # Earlier refusals come first: the source may drop messages below a committed position.
        if to_resend := await self._dead_letter_final(source, source_and_target.refusals):
            self._lag.unsettled_count = len(to_resend)
            source_batch = await self._reread(source, to_resend, start)
            await self._resend_until_accepted(source, target, to_resend, source_batch)
        self._position = self._cursor = start
        try:
            await source.commit_position(self._position, now=True)
            await self._copy_from_cursor(source, target)
        except trio.Cancelled:
            deadline = trio.current_time() + _CLOSE_TIMEOUT_SECONDS
            with trio.CancelScope(shield=True, deadline=deadline):
                await source.commit_position(self._position, now=True)
            raise
        finally:
            if missed_count := source.count_lost_on_close(self._position):
                self._count_missed(missed_count, self._position)

    async def _copy_from_cursor(self, source: MessageSource, target: MessageTarget) -> None:
        in_flight, planned = deque[TargetBatch](), deque[TargetBatch]()
        while True:
            first = next(iter(in_flight or planned), None)
            self._lag.oldest_accepted_at = None if first is None else first.oldest_accepted_at
            if not (planned or in_flight):
                planned.append(await self._wait_for_next_batch(source, target))
            # Prepare batches while the next batch waits for its announcement. One more batch is
            # prepared in any case, so that the same announcement can include it.
            while target.has_room(planned) and (in_flight or self._cursor < self._head):
                batch = await self._read_next_batch(source, target)
                if batch is None:
                    break
                planned.append(batch)
                if not target.must_wait_for_announcement:
                    break
            if planned:
                await self._announce_until_safe(source, target, planned, in_flight)
                target.send(planned[0])
                in_flight.append(planned.popleft())
            elif in_flight:
                await self._settle_oldest(source, target, in_flight)
            if in_flight and not target.has_room(planned):
                await self._settle_oldest(source, target, in_flight)

    async def _settle_oldest(
        self, source: MessageSource, target: MessageTarget, in_flight: deque[TargetBatch]
    ) -> None:
        """Wait for the oldest batch in flight, or for all of them if a part must be resent."""
        batch = in_flight.popleft()
        to_resend = await self._handle_result(source, batch, await target.settle_oldest())
        self._clear_problem()
        if to_resend:
            assert batch.source_batch is not None
            source_batch = batch.source_batch
            while in_flight:
                batch = in_flight.popleft()
                to_resend += await self._handle_result(source, batch, await target.settle_oldest())
                assert batch.source_batch is not None
                source_batch = source_batch.concat(batch.source_batch)
            await self._resend_until_accepted(source, target, to_resend, source_batch)
        self._position = batch.next_sequence
        await source.commit_position(self._position, now=False)

    async def _wait_for_next_batch(
        self, source: MessageSource, target: MessageTarget
    ) -> TargetBatch:
        """Return the next batch as soon as there is one. Nothing is in flight meanwhile."""
        while True:
            batch = await self._read_next_batch(source, target)
            if batch is not None:
                return batch
            self._position = self._cursor
            self._clear_problem()
            self._lag.is_idle = True
            self._cursor = max(self._cursor, await source.wait_for_message(self._cursor))
            self._lag.is_idle = False

    async def _read_next_batch(
        self, source: MessageSource, target: MessageTarget
    ) -> TargetBatch | None:
        """Return the next batch, or None if the source has no message to copy now."""
        while True:
            source_batch = await source.read(self._cursor)
            self._note_read(source_batch)
            batch = target.prepare(source_batch)
            self._cursor = batch.next_sequence
            self._lag.note_read(batch.next_sequence, self._head)
            if batch.count:
                self._lag.unsettled_count += batch.count
                is_whole = batch.next_sequence == source_batch.next_sequence
                batch.source_batch = (
                    source_batch if is_whole else source_batch.below(batch.next_sequence)
                )
                batch.oldest_accepted_at = time.monotonic() - source_batch.oldest_age_seconds
                if self._lag.oldest_accepted_at is None:
                    self._lag.oldest_accepted_at = batch.oldest_accepted_at
                return batch
            self._skipped.update(batch.skipped_counts)
            await self._dead_letter_final(source, _rejected_refusals(batch))
            is_empty = source_batch.next_sequence == source_batch.first_sequence
            if batch.next_sequence >= source_batch.head or is_empty:
                return None

    def _note_read(self, source_batch: SourceBatch) -> None:
        self._head = max(source_batch.head, source_batch.next_sequence)
        if source_batch.missed_count:
            self._count_missed(source_batch.missed_count, source_batch.first_sequence)
        if source_batch.altered_count and not self._altered:
            log.warning(
                "message.altered",
                "{copier}: {alteration}; further altered messages are counted, not logged",
                copier=self.name,
                alteration=source_batch.alteration,
            )
        self._altered += source_batch.altered_count

    def _count_missed(self, count: int, first_sequence: int) -> None:
        self._missed += count
        log.warning(
            "messages.missed",
            "{copier}: missed {count} messages from sequence {sequence} on: the source "
            "dropped them before they were copied",
            copier=self.name,
            count=count,
            sequence=first_sequence,
        )

    async def _announce_until_safe(
        self,
        source: MessageSource,
        target: MessageTarget,
        planned: Sequence[TargetBatch],
        in_flight: deque[TargetBatch],
    ) -> None:
        """Announce `planned`, again and again until the first batch may be sent.

        While the target refuses announcements its bridge record is outdated, so the position is
        committed at the source.
        """
        previous_reason = self._resend_reason
        while True:
            target.announce(planned)
            refusals = await target.wait_announced()
            if not refusals:
                self._resend_reason = previous_reason
                return
            self._check_retryable(refusals)
            self._resend_reason = refusals[0].sentence
            while in_flight:
                await self._settle_oldest(source, target, in_flight)
            await source.commit_position(self._position, now=True)
            await trio.sleep(_RESEND_DELAY_SECONDS)

    async def _handle_result(
        self, source: MessageSource, batch: TargetBatch, refusals: list[Refusal]
    ) -> list[Refusal]:
        """Count a settled batch. Returns the refusals of messages to send again."""
        message_refusals = [refusal for refusal in refusals if refusal.sequence >= 0]
        retryable_count = sum(refusal.code in _RETRYABLE_REFUSALS for refusal in message_refusals)
        self._lag.unsettled_count -= batch.count - retryable_count
        self._check_retryable([refusal for refusal in refusals if refusal.sequence < 0])
        self._skipped.update(batch.skipped_counts)
        duplicate_count = batch.skipped_counts.get(SkipReason.DUPLICATE, 0)
        self._copied += batch.count - len(message_refusals) - duplicate_count
        self._batches += 1
        return await self._dead_letter_final(source, message_refusals + _rejected_refusals(batch))

    async def _dead_letter_final(
        self, source: MessageSource, refusals: list[Refusal]
    ) -> list[Refusal]:
        """Dead-letter the messages that were refused for good. Returns the other refusals."""
        of_messages = [refusal for refusal in refusals if refusal.sequence >= 0]
        final = [refusal for refusal in of_messages if refusal.code not in _RETRYABLE_REFUSALS]
        if final:
            log.warning(
                "refusals.dead_lettered",
                "{copier}: moving {count} refused messages to dead letters; message "
                "{sequence} was refused as {reason}: {sentence}",
                copier=self.name,
                count=len(final),
                sequence=final[0].sequence,
                reason=final[0].code,
                sentence=final[0].sentence,
            )
            missed_count = await source.dead_letter(final)
            self._refused += len(final) - missed_count
            if missed_count:
                self._count_missed(missed_count, final[0].sequence)
        return [refusal for refusal in of_messages if refusal.code in _RETRYABLE_REFUSALS]

    async def _reread(
        self, source: MessageSource, refusals: list[Refusal], next_sequence: int
    ) -> SourceBatch:
        """Read the refused messages that the source still has."""
        sequences = np.sort(np.array([refusal.sequence for refusal in refusals], np.int64))
        result = SourceBatch([], int(sequences[0]), next_sequence, next_sequence)
        row = 0
        while row < sequences.size:
            first = int(sequences[row])
            source_batch = await source.read(first)
            result.runs += source_batch.select(sequences)
            row = int(np.searchsorted(sequences, max(source_batch.next_sequence, first + 1)))
        if missed_count := sequences.size - sum(run.count for run in result.runs):
            self._count_missed(missed_count, result.first_sequence)
        return result

    async def _resend_until_accepted(
        self,
        source: MessageSource,
        target: MessageTarget,
        refusals: list[Refusal],
        source_batch: SourceBatch,
    ) -> None:
        """Send the refused messages of `source_batch` again until the target accepts them.

        Each announcement names all of them, so a killed bridge continues after them.
        """
        log.warning(
            "messages.deferred",
            "{copier}: the target does not accept {count} messages yet; resending until "
            "it accepts them: {reason}",
            copier=self.name,
            count=len(refusals),
            reason=refusals[0].sentence,
        )
        refused_again = refusals
        while refusals:
            self._resend_reason = refusals[0].sentence
            if refused_again:  # Otherwise the target accepts them, a part at a time.
                await trio.sleep(_RESEND_DELAY_SECONDS)
            sequences = np.array([refusal.sequence for refusal in refusals], np.int64)
            batch = target.prepare(replace(source_batch, runs=source_batch.select(sequences)))
            remaining = [refusal for refusal in refusals if refusal.sequence >= batch.next_sequence]
            self._lag.unsettled_count += batch.count + len(remaining) - len(refusals)
            if batch.count:
                await self._announce_until_safe(source, target, [batch], deque())
                target.send(batch)
                result = await target.settle_oldest()
                refused_again = await self._handle_result(source, batch, result)
            else:
                refused_again = await self._handle_result(source, batch, [])
            refusals = refused_again + remaining
        self._resend_reason = ""

    def _check_retryable(self, refusals: list[Refusal]) -> None:
        """Raise RefusedError if the target will never accept an announcement."""
        for refusal in refusals:
            if refusal.code not in _RETRYABLE_REFUSALS:
                raise RefusedError(
                    refusal.code, f"the target refused the bridge record: {refusal.sentence}"
                )


def _rejected_refusals(batch: TargetBatch) -> list[Refusal]:
    return [Refusal(sequence, "unfit", reason) for sequence, reason in batch.rejected]
