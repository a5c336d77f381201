package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.simplebus.client.BusConnection;
import io.simplebus.client.ConnectionRetry;
import io.simplebus.client.Frames;
import io.simplebus.client.Json;
import io.simplebus.client.RefusedException;
import java.io.IOException;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Durable of one query at one bus, which makes the bus retain messages until the query has processed
 * them.
 *
 * <p>It has one position per class and never acks single messages: moving the position forward is its
 * only ack. A named one survives the query, and another query with the same name is rejected; an
 * unnamed one ends with its connection.
 */
final class RetentionDurable {
    static final String EARLIEST = "earliest";
    private static final String NEW = "new";
    private static final String WAITING = "waiting";

    // The connection of a killed query may hold the name until the bus notices its end.
    private static final double NAME_IN_USE_SECONDS = 10;
    private static final double NAME_RETRY_SECONDS = 0.2;
    private static final int SUBSCRIPTION_MAX = 0xFFFF;

    private final BusReader bus;
    private final Subscriptions subscriptions;
    private final String name;
    private final Double idleSeconds;
    private final Map<String, Position> held = new LinkedHashMap<>();

    /** Position of one class at the bus. */
    private record Position(int subscription, long sequence, int connectionCount) {}

    /** Numbers of the subscriptions of one connection. */
    static final class Subscriptions {
        private int next = 1;

        int take() {
            int number = next;
            next = number == SUBSCRIPTION_MAX ? 1 : number + 1;
            return number;
        }
    }

    /**
     * @param name name of the durable; empty for a position that ends with the connection
     * @param idleSeconds time after which the bus deletes the unused durable; null to leave it
     */
    RetentionDurable(BusReader bus, Subscriptions subscriptions, String name, Double idleSeconds) {
        this.bus = bus;
        this.subscriptions = subscriptions;
        this.name = name;
        this.idleSeconds = idleSeconds;
    }

    boolean isActive() {
        return !held.isEmpty();
    }

    /** Retains a class's messages from a sequence on, and releases earlier ones. */
    void retainFrom(String className, long sequence) throws IOException {
        bus.repeat(() -> retain(className, sequence, null));
    }

    /**
     * Retains a class's messages from the earliest one on.
     *
     * @return the first retained sequence
     */
    long retainFromEarliest(String className) throws IOException {
        return bus.repeat(() -> retain(className, 0, EARLIEST));
    }

    /** Opens positions again that were lost with a connection. */
    void restore() throws IOException {
        for (Map.Entry<String, Position> one : List.copyOf(held.entrySet())) {
            retainFrom(one.getKey(), one.getValue().sequence());
        }
    }

    /** @param word start instead of the sequence; null for the sequence */
    private long retain(String className, long sequence, String word) throws IOException {
        Position before = held.get(className);
        if (before != null && before.connectionCount() != bus.connectionCount()) {
            before = null;
        }
        if (before != null && word == null && before.sequence() == sequence) {
            return sequence;
        }
        if (before != null && !name.isEmpty()) {
            unsubscribe(before);
            held.remove(className);
        }
        int number = subscriptions.take();
        JsonNode reply = subscribe(className, number, startOf(sequence, word));
        long begins = startSequence(className, sequence, word, reply);
        held.put(
                className,
                new Position(number, word == null ? sequence : begins, bus.connectionCount()));
        if (before != null && name.isEmpty()) {
            unsubscribe(before); // Only now, so that nothing is released.
        }
        return begins;
    }

    private static JsonNode startOf(long sequence, String word) {
        ObjectNode start = Json.object();
        if (word == null) {
            start.putObject("start").put("sequence", sequence);
        } else {
            start.put("start", word);
        }
        return start.get("start");
    }

    /** Opens a position; waits while another connection holds the name. */
    private JsonNode subscribe(String className, int number, JsonNode start) throws IOException {
        ObjectNode request = Json.object().put("max_in_flight", 1); // One message, which is ignored.
        request.set("start", start);
        if (!name.isEmpty()) {
            request.put("durable", name).put("seek", true);
            if (idleSeconds != null) {
                request.put("idle_seconds", idleSeconds);
            }
        }
        BusConnection connection = bus.connection();
        long deadline = System.nanoTime() + (long) (NAME_IN_USE_SECONDS * 1e9);
        while (true) {
            int sent =
                    connection.send(Frames.SUBSCRIBE, bus.classId(className), number, request);
            try {
                return connection.receiveReply(Frames.SUBSCRIBE, sent);
            } catch (RefusedException error) {
                if (!error.code().equals("durable_in_use")) {
                    throw error;
                }
                if (System.nanoTime() >= deadline) {
                    throw new IllegalStateException(
                            "another query uses the durable '" + name + "' of class " + className
                                    + " at " + bus.server() + ": give each query its own checkpoint and "
                                    + "its own name (option durable; by default a name is generated), "
                                    + "and start it only once",
                            error);
                }
                ConnectionRetry.sleep(NAME_RETRY_SECONDS);
            }
        }
    }

    /**
     * Returns the sequence of a new position. At a stateless server a subscription has its own
     * numbering, so the class's extent is used: messages that arrive between the two requests are
     * retained too.
     */
    private long startSequence(String className, long sequence, String word, JsonNode reply)
            throws IOException {
        if (!bus.memoryId().startsWith(BusReader.CLUSTER_ID_PREFIX)) {
            return reply.path("cursor").asLong();
        }
        ClassExtent extent = bus.getExtent(List.of(className), false).classes().get(className);
        if (word == null) {
            return Math.max(sequence, extent.floor());
        }
        return word.equals(EARLIEST) ? extent.floor() : extent.head();
    }

    /**
     * Claims the messages that wait at the bus for a class's first subscription, and releases them.
     * This query's position already retains them. Unclaimed, they would fill the class for ever.
     */
    void claimWaiting(String className) throws IOException {
        bus.repeat(
                () -> {
                    int number = subscriptions.take();
                    ObjectNode request = Json.object().put("start", WAITING).put("max_in_flight", 1);
                    BusConnection connection = bus.connection();
                    connection.receiveReply(
                            Frames.SUBSCRIBE,
                            connection.send(
                                    Frames.SUBSCRIBE, bus.classId(className), number, request));
                    connection.send(Frames.UNSUBSCRIBE, number, 0, Json.object());
                    return null;
                });
    }

    private void unsubscribe(Position position) throws IOException {
        bus.connection().send(Frames.UNSUBSCRIBE, position.subscription(), 0, Json.object());
    }

    /** Deletes the durable of a class, whichever query created it. */
    void forget(String className) throws IOException {
        bus.repeat(
                () -> {
                    retain(className, 0, NEW);
                    BusConnection connection = bus.connection();
                    int sent =
                            connection.send(
                                    Frames.UNSUBSCRIBE,
                                    held.remove(className).subscription(),
                                    0,
                                    Json.object().put("forget", true));
                    return connection.receiveReply(Frames.UNSUBSCRIBE, sent);
                });
    }

    /** Closes all positions. Named durables remain at the bus. */
    void release() throws IOException {
        for (Position one : held.values()) {
            if (one.connectionCount() == bus.connectionCount()) {
                unsubscribe(one);
            }
        }
        held.clear();
    }
}
