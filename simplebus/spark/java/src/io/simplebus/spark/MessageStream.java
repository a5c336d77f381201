package io.simplebus.spark;

import io.simplebus.client.BusConnectionException;
import io.simplebus.client.ConnectionRetry;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.connector.read.streaming.Offset;
import org.apache.spark.sql.connector.read.streaming.ReadLimit;
import org.apache.spark.sql.connector.read.streaming.ReadMaxRows;
import org.apache.spark.sql.connector.read.streaming.ReportsSourceMetrics;
import org.apache.spark.sql.connector.read.streaming.SupportsTriggerAvailableNow;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.util.LongAccumulator;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Stream of one query: offsets, batches and retention, as the Python source has them.
 *
 * <p>Reading offsets changes nothing. The retained range moves only with commits: with {@link #commit},
 * and with the start of the next batch, which is the end of the last committed one; Spark may skip
 * {@code commit}.
 *
 * <p>Spark requests an initial offset for every query, also if its checkpoint has one, and again if the
 * first batch is repeated. Therefore {@link #initialOffset} never throws. The initial offset counts
 * only when a batch is planned from it: the end offset of that batch stores it as the query's start.
 */
final class MessageStream
        implements MicroBatchStream, SupportsTriggerAvailableNow, ReportsSourceMetrics {
    private static final Logger LOG = LoggerFactory.getLogger("simplebus.spark");

    // Spark asks for the latest offset again at once: 100 requests a second cost a bus 12 % of its rate.
    private static final double IDLE_POLL_SECONDS = 0.1;
    // Delay before a skipped, unreachable bus is tried again.
    private static final double UNREACHABLE_RETRY_SECONDS = 5;
    // A third of the servers' default heartbeat interval; servers wait for three of those intervals.
    private static final long HEARTBEAT_SECONDS = 10;

    private final SourceOptions options;
    private final StructType schema;
    private final BusReaders buses;
    private final QueryRetention retention;
    private final BatchTrigger trigger;
    private final LongAccumulator fetchedBytes;

    /** Identity of the query if it starts without a checkpoint. */
    private final QueryIdentity newQuery =
            new QueryIdentity(UUID.randomUUID().toString().replace("-", ""), "", Map.of());

    /** Error of `initialOffset`; thrown if the query really starts here. */
    private Exception startError;

    private boolean isCheckpointChecked;
    private boolean isAvailableNow;

    /** End of a query with the trigger availableNow; null for none, or before the first batch. */
    private Map<String, ServerOffsets> target;

    /** Heads of the classes when they were last requested. */
    private Offsets heads;

    private final Map<String, Double> unreachableUntil = new LinkedHashMap<>();
    private ScheduledExecutorService heartbeats;

    MessageStream(SourceOptions options, StructType schema) {
        this.options = options;
        this.schema = schema;
        this.buses = new BusReaders(options);
        this.retention = new QueryRetention(buses);
        this.trigger = new BatchTrigger(options.minBatchMessages(), options.maxDelaySeconds());
        this.fetchedBytes =
                SparkSession.active().sparkContext().longAccumulator("simplebus fetched bytes");
    }

    // Offsets -------------------------------------------------------------------------------------

    @Override
    public synchronized Offset initialOffset() {
        startHeartbeats();
        QueryIdentity query = newQuery.withDurable(durableName(newQuery));
        startError = null;
        try {
            return new Offsets(resolveStart(), query);
        } catch (IOException | ClassMissingException | OffsetException error) {
            startError = error;
            return new Offsets(Map.of(), query);
        }
    }

    private Map<String, ServerOffsets> resolveStart() throws IOException {
        OffsetSpec starting = buses.resolveTimes(options.starting());
        Map<String, ServerOffsets> start = starting.resolve(getExtents(true, false));
        boolean isEarliest = starting.isEarliest();
        // A temporary query must not claim messages.
        boolean withWaiting = isEarliest && !durableName(newQuery).isEmpty();
        Map<String, ServerOffsets> found = new LinkedHashMap<>();
        for (Map.Entry<String, ServerOffsets> one : start.entrySet()) {
            // With earliest, other subscriptions may have released some messages meanwhile.
            Map<String, Long> retained =
                    retention.retainStart(
                            one.getKey(), one.getValue().classes(), isEarliest, withWaiting);
            found.put(one.getKey(), new ServerOffsets(one.getValue().memoryId(), retained));
        }
        return found;
    }

    @Override
    public Offset deserializeOffset(String json) {
        return Offsets.parse(json);
    }

    @Override
    public Offset latestOffset() {
        throw new UnsupportedOperationException("Spark calls latestOffset with a limit");
    }

    /** Returns the end of the next batch. Every message before {@code start} is processed. */
    @Override
    public synchronized Offset latestOffset(Offset start, ReadLimit limit) {
        startHeartbeats();
        try {
            return findLatestOffset((Offsets) start, limit);
        } catch (IOException error) {
            throw new UncheckedIOException(error.getMessage(), error);
        }
    }

    private Offset findLatestOffset(Offsets start, ReadLimit limit) throws IOException {
        boolean isStrict = options.failOnDataLoss();
        QueryIdentity query = loadIdentity(start);
        Map<String, BusExtent> extents = getExtents(isStrict, true);
        Map<String, ServerOffsets> position = loadPosition(start, extents);
        Losses.report(ReadPlanner.lostAfterRead(position, extents), isStrict);
        retainFrom(position, extents, durableName(query));
        forgetUnreadClasses(start);
        Map<String, ServerOffsets> all =
                with(position, ReadPlanner.nextBatchEnd(position, extents, null));
        heads = new Offsets(all, null);
        long waiting =
                ReadPlanner.countBacklog(position, extents).values().stream()
                        .mapToLong(Long::longValue)
                        .sum();
        if (!isAvailableNow
                && waiting == 0
                && query != null
                && !query.startOffsets().isEmpty()) {
            ConnectionRetry.sleep(IDLE_POLL_SECONDS);
        }
        if (isAvailableNow) {
            if (target == null) {
                target = all;
            }
        } else if (!trigger.isDue(waiting, System.nanoTime() / 1e9)) {
            return start;
        }
        Long maxMessages = limit instanceof ReadMaxRows rows ? rows.maxRows() : null;
        Map<String, ServerOffsets> end =
                with(position, ReadPlanner.nextBatchEnd(position, extents, maxMessages));
        if (target != null) {
            end = ReadPlanner.limitToTarget(end, target);
        }
        return new Offsets(end, identityAtBatchEnd(query, position));
    }

    private static Map<String, ServerOffsets> with(
            Map<String, ServerOffsets> some, Map<String, ServerOffsets> others) {
        Map<String, ServerOffsets> found = new TreeMap<>(some);
        found.putAll(others);
        return found;
    }

    /**
     * Returns the query's identity from its offset, with the current durable name; null for a
     * checkpoint from before identities. Throws the error of `initialOffset` if {@code start} is that
     * initial offset.
     */
    private QueryIdentity loadIdentity(Offsets start) throws IOException {
        QueryIdentity query = start.query();
        if (query == null) {
            return null;
        }
        if (query.id().equals(newQuery.id())
                && query.startOffsets().isEmpty()
                && startError != null) {
            if (startError instanceof IOException error) {
                throw error;
            }
            throw (RuntimeException) startError;
        }
        return query.withDurable(durableName(query));
    }

    /** Returns the identity to store in the end offset of a batch that starts at a position. */
    private QueryIdentity identityAtBatchEnd(
            QueryIdentity query, Map<String, ServerOffsets> position) {
        QueryIdentity known = query == null ? newQuery.withDurable(durableName(newQuery)) : query;
        return known.startOffsets().isEmpty() ? known.withStartOffsets(position) : known;
    }

    /** Returns the name of the durables; empty for none. */
    private String durableName(QueryIdentity query) {
        if (options.durable() != null) {
            return options.durable();
        }
        return query == null ? "" : "spark " + query.id();
    }

    /** Adapts an offset to the current options. An unreachable bus keeps its offsets. */
    private Map<String, ServerOffsets> loadPosition(
            Offsets start, Map<String, BusExtent> extents) {
        Map<String, ServerOffsets> found = new TreeMap<>();
        for (String server : options.servers()) {
            if (start.servers().containsKey(server) && !extents.containsKey(server)) {
                found.put(server, start.servers().get(server));
            }
        }
        found.putAll(ReadPlanner.merge(start.servers(), extents));
        return found;
    }

    @Override
    public ReadLimit getDefaultReadLimit() {
        return options.maxBatchMessages() == null
                ? ReadLimit.allAvailable()
                : ReadLimit.maxRows(options.maxBatchMessages());
    }

    /** Returns the heads of the classes, shown in the query's progress as latestOffset. */
    @Override
    public synchronized Offset reportLatestOffset() {
        return heads;
    }

    @Override
    public void prepareForTriggerAvailableNow() {
        isAvailableNow = true;
    }

    // Reading -------------------------------------------------------------------------------------

    /** Returns the tasks of a batch, which may be a repeated one. */
    @Override
    public synchronized InputPartition[] planInputPartitions(Offset start, Offset end) {
        startHeartbeats();
        try {
            return plan((Offsets) start, (Offsets) end);
        } catch (IOException error) {
            throw new UncheckedIOException(error.getMessage(), error);
        }
    }

    private InputPartition[] plan(Offsets start, Offsets end) throws IOException {
        QueryIdentity query = end.query();
        Map<String, ServerOffsets> before = start.servers();
        if (query != null && (start.query() == null || !start.query().id().equals(query.id()))) {
            before = query.startOffsets(); // The first batch, repeated: `start` is a new initial offset.
        } else {
            loadIdentity(start);
        }
        Map<String, BusExtent> extents = getExtents(options.failOnDataLoss(), true);
        if (!retention.isActive()) {
            retainFrom(before, extents, durableName(query));
        }
        if (heads == null) { // No `latestOffset` yet: this is a repeated batch.
            heads =
                    new Offsets(
                            with(end.servers(), ReadPlanner.nextBatchEnd(end.servers(), extents, null)),
                            null);
        }
        return MessageBatch.partitions(
                ReadPlanner.plan(before, end.servers(), extents),
                buses,
                RowFilter.of(options.channels()));
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
        return new MessageReaderFactory(schema, fetchedBytes);
    }

    // Retention -----------------------------------------------------------------------------------

    /** Releases the messages before {@code end}, which are processed. */
    @Override
    public synchronized void commit(Offset end) {
        Offsets processed = (Offsets) end;
        try {
            Map<String, BusExtent> extents = getExtents(options.failOnDataLoss(), true);
            retainFrom(processed.servers(), extents, durableName(processed.query()));
        } catch (IOException error) {
            throw new UncheckedIOException(error.getMessage(), error);
        }
    }

    private void retainFrom(
            Map<String, ServerOffsets> offsets, Map<String, BusExtent> extents, String name)
            throws IOException {
        try {
            retention.retainFrom(offsets, extents, name);
        } catch (BusConnectionException error) {
            if (options.failOnDataLoss()) {
                throw error;
            }
            LOG.warn("cannot release processed messages at a bus: {}", error.getMessage());
        }
    }

    /**
     * Deletes durables that the query does not use any more: of classes and buses removed from its
     * options, or with a former durable name.
     */
    private void forgetUnreadClasses(Offsets start) {
        QueryIdentity query = start.query();
        if (isCheckpointChecked || query == null || query.durable().isEmpty()) {
            return;
        }
        isCheckpointChecked = true;
        start.servers()
                .forEach(
                        (server, position) -> {
                            Set<String> classes = new LinkedHashSet<>(position.classes().keySet());
                            if (options.servers().contains(server)
                                    && query.durable().equals(durableName(query))) {
                                classes.removeAll(options.subscribe());
                            }
                            if (!classes.isEmpty()) {
                                retention.forget(server, classes, query.durable());
                            }
                            if (!options.servers().contains(server)) {
                                retention.dropServer(server);
                                buses.close(server);
                            }
                        });
    }

    @Override
    public void stop() {
        if (heartbeats != null) {
            heartbeats.shutdownNow();
        }
        synchronized (this) {
            buses.close();
        }
    }

    /**
     * Returns the stored messages of the reachable buses.
     *
     * @param isStrict true to throw for an unreachable bus; otherwise it is logged and skipped
     * @param creates true to create classes whose id is unused
     */
    private Map<String, BusExtent> getExtents(boolean isStrict, boolean creates)
            throws IOException {
        Map<String, BusExtent> found = new LinkedHashMap<>();
        for (String server : options.servers()) {
            double now = System.nanoTime() / 1e9;
            if (!isStrict
                    && now < unreachableUntil.getOrDefault(server, Double.NEGATIVE_INFINITY)) {
                continue;
            }
            try {
                found.put(server, buses.get(server).getExtent(options.subscribe(), creates));
                unreachableUntil.remove(server);
            } catch (BusConnectionException error) {
                retention.dropServer(server);
                buses.close(server);
                if (isStrict) {
                    throw error;
                }
                unreachableUntil.put(server, now + UNREACHABLE_RETRY_SECONDS);
                LOG.warn("skipped unreachable bus {}: {}", server, error.getMessage());
            }
        }
        BusReaders.checkDistinct(found);
        return found;
    }

    /** Starts to send heartbeats: a batch may take longer than a bus waits for one. */
    private void startHeartbeats() {
        if (heartbeats == null) {
            heartbeats =
                    Executors.newSingleThreadScheduledExecutor(
                            task -> {
                                Thread thread = new Thread(task, "simplebus heartbeats");
                                thread.setDaemon(true);
                                return thread;
                            });
            heartbeats.scheduleWithFixedDelay(
                    this::sendHeartbeats, HEARTBEAT_SECONDS, HEARTBEAT_SECONDS, TimeUnit.SECONDS);
        }
    }

    private synchronized void sendHeartbeats() {
        for (BusReader one : List.copyOf(buses.all())) {
            try {
                one.connection().sendHeartbeat();
            } catch (IOException lost) {
                try {
                    one.reconnect();
                    retention.restore(one.server());
                } catch (IOException | RuntimeException error) {
                    LOG.debug("a bus is not reachable; the next batch reports it", error);
                }
            }
        }
    }

    // Progress ------------------------------------------------------------------------------------

    /** Returns the lag by server and class, and the bytes that tasks have fetched so far. */
    @Override
    public synchronized Map<String, String> metrics(Optional<Offset> latestConsumedOffset) {
        Map<String, String> found = new TreeMap<>();
        found.put(FetchedBytesMetric.NAME, String.valueOf(fetchedBytes.value()));
        if (heads != null && latestConsumedOffset.isPresent()) {
            Map<String, ServerOffsets> consumed =
                    Offsets.parse(latestConsumedOffset.get().json()).servers();
            heads.servers()
                    .forEach(
                            (server, head) ->
                                    head.classes()
                                            .forEach(
                                                    (name, next) ->
                                                            found.put(
                                                                    "lag " + server + " " + name,
                                                                    String.valueOf(
                                                                            lag(
                                                                                    consumed.get(server),
                                                                                    head,
                                                                                    name)))));
        }
        return found;
    }

    private static long lag(ServerOffsets consumed, ServerOffsets head, String name) {
        long next = head.classes().get(name);
        boolean isKnown =
                consumed != null
                        && ServerOffsets.isSameMemory(consumed.memoryId(), head.memoryId());
        return next - (isKnown ? Math.min(consumed.classes().getOrDefault(name, 0L), next) : 0);
    }

    /** Returns the description of the source in the query's progress. */
    @Override
    public String toString() {
        return "SimplebusMicroBatchStream[" + String.join(",", options.subscribe()) + " at "
                + String.join(",", options.servers()) + "]";
    }
}
