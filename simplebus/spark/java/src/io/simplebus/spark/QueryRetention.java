package io.simplebus.spark;

import io.simplebus.client.BusConnectionException;
import io.simplebus.client.RefusedException;
import java.io.IOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Retention of one running query at all its buses, over shared connections.
 *
 * <pre>
 *     committed │ retained for the query               │
 *        position ── start ── end ── … ── head
 * </pre>
 */
final class QueryRetention {
    private static final Logger LOG = LoggerFactory.getLogger("simplebus.spark");

    private final BusReaders buses;
    private final Map<String, RetentionDurable.Subscriptions> subscriptions = new LinkedHashMap<>();
    private Map<String, RetentionDurable> durables = new LinkedHashMap<>();

    /** Unnamed durables that retain the possible start of the query until its first batch. */
    private final Map<String, RetentionDurable> startDurables = new LinkedHashMap<>();

    private String durableName = "";

    QueryRetention(BusReaders buses) {
        this.buses = buses;
    }

    private RetentionDurable open(String server, String name, Double idleSeconds)
            throws IOException {
        return new RetentionDurable(
                buses.get(server),
                subscriptions.computeIfAbsent(
                        server, key -> new RetentionDurable.Subscriptions()),
                name,
                idleSeconds);
    }

    /** Returns true if a named or regular durable is open. */
    boolean isActive() {
        return durables.values().stream().anyMatch(RetentionDurable::isActive);
    }

    /**
     * Retains the query's possible start as long as this connection lasts.
     *
     * @param classes start by class
     * @param isEarliest true to start at the earliest stored messages instead
     * @param withWaiting true to claim messages that wait for a first subscription
     * @return the first retained sequence, by class
     */
    Map<String, Long> retainStart(
            String server, Map<String, Long> classes, boolean isEarliest, boolean withWaiting)
            throws IOException {
        RetentionDurable durable = open(server, "", null);
        startDurables.put(server, durable);
        Map<String, Long> found = new LinkedHashMap<>();
        for (Map.Entry<String, Long> one : classes.entrySet()) {
            long first = one.getValue();
            if (isEarliest) {
                first = durable.retainFromEarliest(one.getKey());
            } else {
                durable.retainFrom(one.getKey(), first);
            }
            found.put(one.getKey(), first);
        }
        if (withWaiting) {
            for (String name : classes.keySet()) {
                durable.claimWaiting(name);
            }
        }
        return found;
    }

    /** Retains messages from these offsets on, under the name, and releases earlier ones. */
    void retainFrom(
            Map<String, ServerOffsets> offsets, Map<String, BusExtent> extents, String name)
            throws IOException {
        Map<String, RetentionDurable> previous = Map.of();
        if (!name.equals(durableName)) {
            previous = durables;
            durables = new LinkedHashMap<>();
            durableName = name;
        }
        for (Map.Entry<ReadPlanner.Source, Long> one :
                ReadPlanner.firstAvailable(offsets, extents).entrySet()) {
            String server = one.getKey().server();
            if (!durables.containsKey(server)) {
                durables.put(server, open(server, name, buses.options().durableIdleSeconds()));
            }
            durables.get(server).retainFrom(one.getKey().className(), one.getValue());
        }
        for (RetentionDurable one : previous.values()) {
            one.release();
        }
        for (String server : new ArrayList<>(startDurables.keySet())) {
            if (extents.containsKey(server)) {
                startDurables.remove(server).release();
            }
        }
    }

    /** Opens the positions at a bus again after its connection was replaced. */
    void restore(String server) throws IOException {
        for (Map<String, RetentionDurable> some : List.of(durables, startDurables)) {
            if (some.containsKey(server)) {
                some.get(server).restore();
            }
        }
    }

    /** Discards the durables of a lost connection. */
    void dropServer(String server) {
        durables.remove(server);
        startDurables.remove(server);
        subscriptions.remove(server);
    }

    /** Deletes the durable of these classes; logs a warning if the bus cannot be reached. */
    void forget(String server, Iterable<String> classes, String name) {
        try {
            RetentionDurable durable = open(server, name, null);
            for (String one : classes) {
                durable.forget(one);
            }
        } catch (BusConnectionException | RefusedException | IllegalStateException error) {
            LOG.warn(
                    "cannot delete durable '{}' at {}, which may still retain unread messages: {}",
                    name,
                    server,
                    error.getMessage());
        } catch (IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }
}
