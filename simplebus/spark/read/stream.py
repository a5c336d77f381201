"""Stream reader: offsets, batches and retention of one query.

Reading offsets changes nothing. The retained range moves only with commits: with `commit`, and with
the start of the next batch, which is the end of the last committed one; Spark may skip `commit`.

The reader of the driver lives as long as the query and connects on its first call. Spark also
creates readers elsewhere, without ever calling their offsets.

Spark requests an initial offset for every query, also if its checkpoint has one, and again if the
first batch is repeated. Therefore `initialOffset` never raises. The initial offset counts only when
a batch is planned from it: the end offset of that batch stores it as the query's start.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from simplebus.logs.event_logger import EventLogger
from simplebus.logs.sampling import is_logged
from simplebus.spark.batch_trigger import BatchTrigger
from simplebus.spark.connections import UNREACHABLE_ERRORS, SourceConnections
from simplebus.spark.error_reports import report_without_traceback
from simplebus.spark.keepalive import ConnectionKeepalive
from simplebus.spark.options import SourceOptions, is_path
from simplebus.spark.read.bus_reader import ClassMissingError, report_losses
from simplebus.spark.read.offsets import (
    BusExtent,
    OffsetError,
    QueryIdentity,
    ServerOffsets,
    check_distinct,
    dump_offsets,
    load_offsets,
    load_query,
    merge_offsets,
    resolve_offsets,
)
from simplebus.spark.read.planner import (
    count_backlog,
    limit_to_target,
    lost_after_read,
    next_batch_end,
    plan_reads,
)
from simplebus.spark.read.retention_durable import NoRetention, QueryRetention
from simplebus.spark.read.tasks import make_partitions, read_partition
from simplebus.spark.read.time_offsets import option_name, resolve_times

if TYPE_CHECKING:
    import pyarrow as pa

log = EventLogger("simplebus.spark")

OffsetJson = dict[str, Any]
"""Offsets as Spark stores them."""

# Spark asks for the latest offset again at once: 100 requests a second cost a bus 12 % of its rate.
_IDLE_POLL_SECONDS = 0.1
# Delay before a skipped, unreachable bus is tried again.
_UNREACHABLE_RETRY_SECONDS = 5.0


class SparkStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for `spark.readStream`."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._connections = SourceConnections(options)
        self._retention = NoRetention() if options.is_journal else QueryRetention(self._connections)
        self._keepalive: ConnectionKeepalive | None = None
        """None until the first call: its lock cannot be pickled for executors."""
        self._new_query = QueryIdentity(uuid.uuid4().hex)
        """Identity of the query if it starts without a checkpoint."""
        self._start_error: Exception | None = None
        """Error of `initialOffset`; raised if the query really starts here."""
        self._release_failures = 0
        self._is_checkpoint_checked = False
        """True after durables of classes that are not read any more were deleted."""
        self._is_available_now = False
        self._target: dict[str, ServerOffsets] | None = None
        """End of a query with the trigger availableNow; None for no end, or before the first batch.
        """
        self._batch_trigger = BatchTrigger(
            min_messages=options.min_batch_messages, max_delay_seconds=options.max_delay_seconds
        )
        self._heads: OffsetJson | None = None
        """Heads of the classes when they were last requested."""
        self._unreachable_until: dict[str, float] = {}
        """Time of the next attempt, by unreachable server."""

    # Offsets -------------------------------------------------------------------------------------

    def initialOffset(self) -> OffsetJson:  # noqa: N802
        """Return the start of a query without a checkpoint. Spark calls it for every query."""
        query = replace(self._new_query, durable=self._durable_name(self._new_query))
        with self._connection_lock():
            self._start_error = None
            try:
                return dump_offsets(self._resolve_start(), query)
            except (*UNREACHABLE_ERRORS, ClassMissingError, OffsetError) as error:
                self._start_error = error
                return dump_offsets({}, query)

    def _resolve_start(self) -> dict[str, ServerOffsets]:
        options = self._options
        starting = resolve_times(options.starting, self._connections)
        extents = self._get_extents(strict=True, make=False)
        option = option_name(options.starting, "startingOffsets")
        start = resolve_offsets(starting, extents, option=option)
        for server, position in start.items():
            is_all = starting == "earliest"
            # A temporary query must not claim messages.
            stays = bool(self._durable_name(self._new_query))
            retained = self._retention.retain_start(
                server, position.classes, with_waiting=is_all and stays
            )
            if is_all:  # Other subscriptions may have released messages meanwhile.
                start[server] = ServerOffsets(position.memory_id, retained)
        return start

    def latestOffset(self, start: OffsetJson, limit: ReadLimit) -> OffsetJson:  # noqa: N802
        """Return the end of the next batch. Every message before `start` is processed."""
        with report_without_traceback(), self._connection_lock():
            query = self._load_identity(start)
            extents = self._get_extents(strict=self._options.fail_on_data_loss)
            position = self._load_position(start, extents)
            report_losses(
                lost_after_read(position, extents), strict=self._options.fail_on_data_loss
            )
            self._retain_from(position, extents, self._durable_name(query))
            self._forget_unread_classes(start)
            heads = position | next_batch_end(position, extents)
            self._heads = dump_offsets(heads)
            waiting = count_backlog(position, extents)
            for (server, name), count in waiting.items():
                log.debug(
                    "spark_backlog.measured",
                    "{count} messages of class {class_name} at {server} wait",
                    count=count,
                    class_name=name,
                    server=server,
                )
            if (
                not (self._is_available_now or any(waiting.values()))
                and query is not None
                and query.start_offsets
            ):
                sleep(_IDLE_POLL_SECONDS)
            if self._is_available_now:
                if self._target is None:
                    self._target = heads
            elif not self._batch_trigger.is_due(sum(waiting.values()), monotonic()):
                return start
            max_messages = limit.max_rows if isinstance(limit, ReadMaxRows) else None
            end = position | next_batch_end(position, extents, max_messages)
            if self._target is not None:
                end = limit_to_target(end, self._target)
            return dump_offsets(end, self._identity_at_batch_end(query, position))

    def _load_identity(self, start: OffsetJson) -> QueryIdentity | None:
        """Return the query's identity from its offset, with the current durable name.

        None for a checkpoint from before durable names. Raises the error of `initialOffset` if
        `start` is that initial offset.
        """
        query = load_query(start)
        if query is None:
            return None
        if (
            query.id == self._new_query.id
            and not query.start_offsets
            and self._start_error is not None
        ):
            raise self._start_error
        return replace(query, durable=self._durable_name(query))

    def _identity_at_batch_end(
        self, query: QueryIdentity | None, position: dict[str, ServerOffsets]
    ) -> QueryIdentity:
        """Return the identity to store in the end offset of a batch that starts at `position`."""
        if query is None:
            query = replace(self._new_query, durable=self._durable_name(self._new_query))
        return query if query.start_offsets else replace(query, start_offsets=position)

    def _durable_name(self, query: QueryIdentity | None) -> str:
        """Return the name of the query's durables; empty if the query has no durable."""
        durable = self._options.durable
        if durable is not None:
            return durable
        return "" if query is None else f"spark {query.id}"

    def _load_position(
        self, start: OffsetJson, extents: dict[str, BusExtent]
    ) -> dict[str, ServerOffsets]:
        """Adapt `start` to the current options. An unreachable bus keeps its offsets."""
        before = load_offsets(start)
        unreachable = {
            server: before[server]
            for server in self._options.servers
            if server in before and server not in extents
        }
        return unreachable | merge_offsets(before, extents)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the maximum size of a batch."""
        max_messages = self._options.max_batch_messages
        return ReadAllAvailable() if max_messages is None else ReadMaxRows(max_messages)

    def reportLatestOffset(self) -> OffsetJson | None:  # noqa: N802
        """Return the heads of the classes, shown in the query's progress as latestOffset."""
        return self._heads

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end with the messages available at its first `latestOffset`."""
        self._is_available_now = True

    # Reading -------------------------------------------------------------------------------------

    def partitions(self, start: OffsetJson, end: OffsetJson) -> Sequence[InputPartition]:
        """Return the tasks of a batch. Spark may repeat a batch."""
        with self._connection_lock():
            query, before = load_query(end), load_offsets(start)
            start_query = load_query(start)
            if query is not None and (start_query is None or start_query.id != query.id):
                # The first batch, repeated: `start` is a new initial offset.
                before = dict(query.start_offsets)
            else:
                self._load_identity(start)
            extents = self._get_extents(strict=self._options.fail_on_data_loss)
            if not self._retention.is_active:
                self._retain_from(before, extents, self._durable_name(query))
            target = load_offsets(end)
            if self._heads is None:  # No `latestOffset` yet: this is a repeated batch.
                self._heads = dump_offsets(target | next_batch_end(target, extents))
            return make_partitions(plan_reads(before, target, extents), self._connections)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages of one task."""
        return read_partition(partition)

    # Retention -----------------------------------------------------------------------------------

    def commit(self, end: OffsetJson) -> None:
        """Release the messages before `end`, which are processed."""
        with self._connection_lock():
            extents = self._get_extents(strict=self._options.fail_on_data_loss)
            self._retain_from(load_offsets(end), extents, self._durable_name(load_query(end)))

    def _retain_from(
        self, offsets: dict[str, ServerOffsets], extents: dict[str, BusExtent], durable: str
    ) -> None:
        try:
            self._retention.retain_from(offsets, extents, durable)
        except UNREACHABLE_ERRORS as error:
            if self._options.fail_on_data_loss:
                raise
            self._release_failures += 1
            if is_logged(self._release_failures):
                log.warning(
                    "durable.release_failed",
                    "cannot release processed messages at a bus: {error}",
                    error=error,
                )

    def _forget_unread_classes(self, start: OffsetJson) -> None:
        """Delete durables that the query does not use any more.

        These belong to classes and buses removed from its options, or have a former durable name.
        """
        query, options = load_query(start), self._options
        if self._is_checkpoint_checked or query is None or not query.durable:
            return
        self._is_checkpoint_checked = True
        for server, position in load_offsets(start).items():
            classes = list(position.classes)
            if server in options.servers and query.durable == self._durable_name(query):
                classes = [name for name in classes if name not in options.subscribe]
            if classes and not is_path(server):
                QueryRetention(self._connections).forget(server, classes, query.durable)
            if server not in options.servers:
                self._connections.close_server(server)

    def stop(self) -> None:
        """Close all connections at the end of the query's run."""
        if self._keepalive is not None:
            self._keepalive.stop()
        self._connections.close()

    def _connection_lock(self) -> threading.RLock:
        """Return the lock to hold while using connections. The first call starts the keepalive."""
        if self._keepalive is None:
            self._keepalive = ConnectionKeepalive(self._connections.client_connections)
            self._keepalive.start()
        return self._keepalive.lock

    def _get_extents(self, *, strict: bool, make: bool = True) -> dict[str, BusExtent]:
        """Return the stored messages of the reachable buses.

        An unreachable bus raises one of UNREACHABLE_ERRORS if `strict`; otherwise the reader logs
        it and skips it for a while. Raises OffsetError if two names are the same bus.
        """
        found = {}
        for server in self._options.servers:
            if not strict and monotonic() < self._unreachable_until.get(server, 0.0):
                continue
            try:
                found[server] = self._connections[server].get_extent(
                    self._options.subscribe, make=make
                )
                self._unreachable_until.pop(server, None)
            except UNREACHABLE_ERRORS as error:
                self._retention.drop_server(server)
                self._connections.close_server(server)
                if strict:
                    raise
                self._unreachable_until[server] = monotonic() + _UNREACHABLE_RETRY_SECONDS
                log.warning(
                    "bus.skipped",
                    "skipped unreachable bus {server}: {error}",
                    server=server,
                    error=error,
                )
        check_distinct(
            {server: memory.memory_id for server, memory in found.items()},
            "bus",
            self._options.location_option,
        )
        return found
