package io.simplebus.spark;

import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Planning of a batch: from offsets and stored messages to ranges of messages.
 *
 * <p>Planning is deterministic and does no I/O, because a failed batch is planned again. Each message
 * that should be read but is not stored any more belongs to a {@link LostRange}.
 *
 * <pre>
 *     lost     │ read              │ later
 *     start ── floor ───────────── end ── head
 * </pre>
 */
final class ReadPlanner {
    private static final String NOT_SUBSCRIBED =
            "the query does not read the class any more, or the bus does not answer";

    private ReadPlanner() {}

    /** Ranges to read and ranges that are lost. */
    record ReadPlan(List<MessageRange> ranges, List<LostRange> losses) {}

    /** One class at one server. */
    record Source(String server, String className) {}

    /**
     * Returns the ranges from start to end that are stored, and the lost ones.
     *
     * <p>A server or class without a start is read from its floor. One without an extent is not
     * subscribed to any more, or unreachable.
     */
    static ReadPlan plan(
            Map<String, ServerOffsets> start,
            Map<String, ServerOffsets> end,
            Map<String, BusExtent> extents) {
        ReadPlan plan = new ReadPlan(new ArrayList<>(), new ArrayList<>());
        end.forEach(
                (server, position) -> {
                    BusExtent extent = extents.getOrDefault(server, BusExtent.EMPTY);
                    ServerOffsets before =
                            start.getOrDefault(
                                    server, new ServerOffsets(position.memoryId(), Map.of()));
                    position.classes()
                            .forEach(
                                    (name, last) ->
                                            planClass(
                                                    plan,
                                                    new Source(server, name),
                                                    before,
                                                    position.memoryId(),
                                                    last,
                                                    extent));
                });
        return plan;
    }

    private static void planClass(
            ReadPlan plan,
            Source source,
            ServerOffsets before,
            String memoryId,
            long last,
            BusExtent extent) {
        String server = source.server();
        String name = source.className();
        Long first = before.classes().get(name);
        ClassExtent held = extent.classes().get(name);
        if (held == null) {
            if (first == null || first < last) {
                long lostFirst = first == null ? 0 : first;
                plan.losses().add(new LostRange(server, name, lostFirst, last, NOT_SUBSCRIBED));
            }
            return;
        }
        if (first != null && !ServerOffsets.isSameMemory(before.memoryId(), memoryId)) {
            String reason =
                    "they had the memory id " + before.memoryId() + ", and the bus was reset since";
            plan.losses().add(new LostRange(server, name, first, LostRange.UNKNOWN, reason));
            first = null;
        }
        if (!ServerOffsets.isSameMemory(memoryId, extent.memoryId())) {
            String reason = "the bus was reset and has the memory id " + extent.memoryId() + " now";
            long lostFirst = first == null ? last : first;
            plan.losses().add(new LostRange(server, name, lostFirst, last, reason));
            return;
        }
        long from = first == null ? Math.min(held.floor(), last) : first;
        if (from < held.floor() && from < last) {
            String reason = "the class holds messages from " + held.floor() + " on";
            plan.losses()
                    .add(new LostRange(server, name, from, Math.min(held.floor(), last), reason));
        }
        if (last > Math.max(from, held.head())) {
            String reason = "the next message of the class will be " + held.head();
            plan.losses()
                    .add(new LostRange(server, name, Math.max(from, held.head()), last, reason));
        }
        long begin = Math.max(from, held.floor());
        long end = Math.min(last, held.head());
        if (begin < end) {
            plan.ranges().add(new MessageRange(server, extent.memoryId(), name, begin, end));
        }
    }

    /**
     * Returns the ranges that were read and that the bus lost since, so it assigns their sequences
     * again. A bus loses messages and keeps its memory id only if its durability is lower than disk.
     */
    static List<LostRange> lostAfterRead(
            Map<String, ServerOffsets> start, Map<String, BusExtent> extents) {
        List<LostRange> found = new ArrayList<>();
        extents.forEach(
                (server, extent) -> {
                    ServerOffsets before = start.get(server);
                    if (before == null
                            || !ServerOffsets.isSameMemory(before.memoryId(), extent.memoryId())) {
                        return;
                    }
                    extent.classes()
                            .forEach(
                                    (name, held) -> {
                                        long next = before.classes().getOrDefault(name, 0L);
                                        if (next > held.head()) {
                                            String reason =
                                                    "they were read, and the bus has lost them since: "
                                                            + "the next message of the class will be "
                                                            + held.head();
                                            found.add(
                                                    new LostRange(
                                                            server, name, held.head(), next, reason));
                                        }
                                    });
                });
        return found;
    }

    /**
     * Returns the end of the next batch: the heads, or at most {@code maxMessages} after start.
     *
     * <p>The messages are shared among classes in proportion to their backlogs. Offsets of another
     * memory are replaced by offsets of the current one, and an offset beyond the head by the head.
     *
     * @param maxMessages limit; null for none
     */
    static Map<String, ServerOffsets> nextBatchEnd(
            Map<String, ServerOffsets> start, Map<String, BusExtent> extents, Long maxMessages) {
        Map<Source, Long> starts = firstAvailable(start, extents);
        Map<Source, Long> shares = shareLimit(countBacklog(start, extents), maxMessages);
        Map<String, ServerOffsets> found = new LinkedHashMap<>();
        extents.forEach(
                (server, extent) -> {
                    Map<String, Long> classes = new LinkedHashMap<>();
                    for (String name : extent.classes().keySet()) {
                        Source source = new Source(server, name);
                        classes.put(name, starts.get(source) + shares.get(source));
                    }
                    found.put(server, new ServerOffsets(extent.memoryId(), classes));
                });
        return found;
    }

    /** Returns the first stored sequence at or after start, by server and class. */
    static Map<Source, Long> firstAvailable(
            Map<String, ServerOffsets> start, Map<String, BusExtent> extents) {
        Map<Source, Long> found = new LinkedHashMap<>();
        extents.forEach(
                (server, extent) -> {
                    ServerOffsets before = start.get(server);
                    boolean isKnown =
                            before != null
                                    && ServerOffsets.isSameMemory(
                                            before.memoryId(), extent.memoryId());
                    extent.classes()
                            .forEach(
                                    (name, held) -> {
                                        long first =
                                                isKnown
                                                        ? before.classes()
                                                                .getOrDefault(name, held.floor())
                                                        : held.floor();
                                        found.put(
                                                new Source(server, name),
                                                isKnown
                                                        ? Math.min(
                                                                Math.max(first, held.floor()),
                                                                held.head())
                                                        : held.floor());
                                    });
                });
        return found;
    }

    /** Returns how many stored messages are after {@code end}, by server and class. */
    static Map<Source, Long> countBacklog(
            Map<String, ServerOffsets> end, Map<String, BusExtent> extents) {
        Map<Source, Long> found = new LinkedHashMap<>();
        firstAvailable(end, extents)
                .forEach(
                        (source, first) -> {
                            long head =
                                    extents.get(source.server())
                                            .classes()
                                            .get(source.className())
                                            .head();
                            found.put(source, Math.max(0, head - first));
                        });
        return found;
    }

    private static Map<Source, Long> shareLimit(Map<Source, Long> waiting, Long maxMessages) {
        long total = waiting.values().stream().mapToLong(Long::longValue).sum();
        if (maxMessages == null || total <= maxMessages) {
            return waiting;
        }
        Map<Source, Long> shares = new LinkedHashMap<>();
        waiting.forEach(
                (source, count) -> shares.put(source, scale(count, maxMessages, total)));
        long remaining = maxMessages - shares.values().stream().mapToLong(Long::longValue).sum();
        List<Source> order = new ArrayList<>(waiting.keySet());
        order.sort(Comparator.comparingLong(source -> shares.get(source) - waiting.get(source)));
        for (Source source : order) {
            long more = Math.min(remaining, waiting.get(source) - shares.get(source));
            shares.merge(source, more, Long::sum);
            remaining -= more;
        }
        return shares;
    }

    /** Returns {@code count * numerator / denominator}, rounded down. */
    private static long scale(long count, long numerator, long denominator) {
        return BigInteger.valueOf(count)
                .multiply(BigInteger.valueOf(numerator))
                .divide(BigInteger.valueOf(denominator))
                .longValue();
    }

    /**
     * Cuts ranges into pieces of about equal size for tasks.
     *
     * @param maxMessages maximum size of a piece
     * @param minRanges minimum number of pieces, if there are enough messages; null for none
     */
    static List<MessageRange> split(List<MessageRange> ranges, long maxMessages, Long minRanges) {
        long total = ranges.stream().mapToLong(MessageRange::count).sum();
        long size = maxMessages;
        if (minRanges != null && total > 0) {
            size = Math.min(size, Math.max(1, total / minRanges));
        }
        List<MessageRange> found = new ArrayList<>();
        for (MessageRange one : ranges) {
            long pieces = (one.count() + size - 1) / size;
            long first = one.first();
            for (long piece = 1; piece <= pieces; piece++) {
                long last = one.first() + scale(one.count(), piece, pieces);
                found.add(
                        new MessageRange(one.server(), one.memoryId(), one.className(), first, last));
                first = last;
            }
        }
        return found;
    }

    /**
     * Returns {@code end}, limited to {@code target}. A server whose memory changed since the target
     * was set is not read further.
     */
    static Map<String, ServerOffsets> limitToTarget(
            Map<String, ServerOffsets> end, Map<String, ServerOffsets> target) {
        Map<String, ServerOffsets> found = new LinkedHashMap<>();
        end.forEach(
                (server, position) -> {
                    ServerOffsets limit =
                            target.getOrDefault(
                                    server, new ServerOffsets(position.memoryId(), Map.of()));
                    if (!ServerOffsets.isSameMemory(position.memoryId(), limit.memoryId())) {
                        found.put(server, limit);
                        return;
                    }
                    Map<String, Long> classes = new LinkedHashMap<>();
                    position.classes()
                            .forEach(
                                    (name, sequence) ->
                                            classes.put(
                                                    name,
                                                    Math.min(
                                                            sequence,
                                                            limit.classes()
                                                                    .getOrDefault(name, sequence))));
                    found.put(server, new ServerOffsets(position.memoryId(), classes));
                });
        return found;
    }

    /**
     * Adapts offsets to the servers and classes that are read now. Added ones start at their earliest
     * stored message; those not read any more are dropped.
     */
    static Map<String, ServerOffsets> merge(
            Map<String, ServerOffsets> offsets, Map<String, BusExtent> extents) {
        Map<String, ServerOffsets> found = new LinkedHashMap<>();
        extents.forEach(
                (server, extent) -> {
                    ServerOffsets before =
                            offsets.getOrDefault(
                                    server, new ServerOffsets(extent.memoryId(), Map.of()));
                    Map<String, Long> classes = new LinkedHashMap<>();
                    extent.classes()
                            .forEach(
                                    (name, held) ->
                                            classes.put(
                                                    name,
                                                    before.classes()
                                                            .getOrDefault(name, held.floor())));
                    found.put(server, new ServerOffsets(before.memoryId(), classes));
                });
        return found;
    }
}
