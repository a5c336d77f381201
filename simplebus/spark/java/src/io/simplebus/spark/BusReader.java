package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.simplebus.client.BusAddress;
import io.simplebus.client.BusConnection;
import io.simplebus.client.BusConnectionException;
import io.simplebus.client.ConnectionRetry;
import io.simplebus.client.Credentials;
import io.simplebus.client.Frames;
import io.simplebus.client.Json;
import io.simplebus.client.RefusedException;
import io.simplebus.client.SimilarNames;
import java.io.Closeable;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * Reader of a bus: resolves class names and gets extents.
 *
 * <p>Requests change nothing at the bus except that new class names get ids. So they are repeated
 * after a lost connection, for up to the option {@code timeout}.
 */
final class BusReader implements Closeable {
    static final long SEQUENCE_MAX = Long.MAX_VALUE;

    /** Timeout of a first connection without retries: the user who starts a query waits for it. */
    private static final double CONNECT_SECONDS = 5;

    /** Memory ids of stateless servers begin with it. */
    static final String CLUSTER_ID_PREFIX = "cluster.";

    private static final String DEAD_LETTER_PREFIX = "dead.";
    private static final int SIMILAR_NAMES_MAX = 3;
    private static final double SIMILARITY_MIN = 0.6;

    /** Advice for refused classes, by reason code. */
    private static final Map<String, String> CLASS_HINTS =
            Map.of(
                    "unknown_class",
                    "expected a class that exists: check the option subscribe, or publish to the class "
                            + "first",
                    "unauthorized",
                    "expected a class that the user may subscribe to: check the option subscribe and "
                            + "the permissions of the user");

    private final String server;
    private final double timeoutSeconds;
    private final Map<String, Integer> ids = new HashMap<>();
    private BusConnection connection;
    private int connectionCount;

    /**
     * Connects.
     *
     * @param retriesConnect true to retry the first connection for the whole timeout, too
     */
    BusReader(String server, double timeoutSeconds, boolean retriesConnect) throws IOException {
        this.server = server;
        this.timeoutSeconds = timeoutSeconds;
        if (retriesConnect) {
            reconnect();
        } else {
            connection =
                    BusConnection.connect(
                            BusAddress.parse(server),
                            credentials(),
                            null,
                            ConnectionRetry.toDuration(Math.min(timeoutSeconds, CONNECT_SECONDS)));
            connectionCount++;
        }
    }

    String server() {
        return server;
    }

    /** Returns the current connection. */
    BusConnection connection() {
        return connection;
    }

    /** Returns the number of connections so far: it changes when a connection was replaced. */
    int connectionCount() {
        return connectionCount;
    }

    String memoryId() {
        return connection.memoryId();
    }

    private Credentials credentials() throws IOException {
        return Credentials.fromEnvironment(System.getenv());
    }

    /** Replaces the connection; tries for the timeout. */
    void reconnect() throws IOException {
        if (connection != null) {
            connection.close();
        }
        connection =
                ConnectionRetry.connect(
                        BusAddress.parse(server), credentials(), null, timeoutSeconds);
        connectionCount++;
    }

    /** Requests to a bus. */
    interface Requests<T> {
        T send() throws IOException;
    }

    /** Sends requests, again if the connection is lost meanwhile. */
    <T> T repeat(Requests<T> requests) throws IOException {
        while (true) {
            try {
                return requests.send();
            } catch (BusConnectionException error) {
                if (error.isPermanent()) {
                    throw error;
                }
                reconnect();
            }
        }
    }

    /** Returns the id of a class, given as digits or a name. A new name is assigned an id. */
    int classId(String name) throws IOException {
        Integer known = ids.get(name);
        if (known == null) {
            known = SourceOptions.classId(name);
            if (known == null) {
                try {
                    known = repeat(() -> connection.nameClasses(List.of(name)).path(name).asInt());
                } catch (RefusedException error) {
                    throw classError(error);
                }
            }
            ids.put(name, known);
        }
        return known;
    }

    /**
     * Creates a class, given as digits or a name, if it does not exist.
     *
     * @throws RefusedException if the bus refuses the class
     */
    void createClass(String name) throws IOException {
        Integer id = SourceOptions.classId(name);
        repeat(() -> connection.nameClasses(List.<Object>of(id == null ? name : id)));
    }

    /**
     * Throws an exception if a class, given by its name, does not exist. Creates none, unlike {@link
     * #classId}. A class of dead letters may be missing, since the first dead letter creates it.
     *
     * <p>Checks nothing without the right {@code inquire}, or at a stateless server, which knows only
     * the classes that it has used.
     *
     * @throws ClassMissingException if a class does not exist; the message names similar ones
     */
    void checkClasses(List<String> names) throws IOException {
        if (memoryId().startsWith(CLUSTER_ID_PREFIX)) {
            return;
        }
        for (String name : names) {
            if (SourceOptions.classId(name) != null || isDeadLetterClass(name)) {
                continue;
            }
            try {
                inquire(Json.object().put("about", "class").put("class", name));
            } catch (RefusedException error) {
                if (error.code().equals("unauthorized")) {
                    return;
                }
                if (error.code().equals("unknown_class")) {
                    throw missingClassError(name);
                }
                throw error;
            }
        }
    }

    /** Returns the names of all classes. Needs the right {@code inquire}. */
    List<String> classNames() throws IOException {
        List<String> names = new ArrayList<>();
        for (JsonNode one : inquire(Json.object().put("about", "bus")).path("classes")) {
            String name = one.path("name").asText("");
            if (!name.isEmpty()) {
                names.add(name);
            }
        }
        return names;
    }

    /** Returns true if a class holds dead letters. */
    static boolean isDeadLetterClass(String name) {
        return name.startsWith(DEAD_LETTER_PREFIX);
    }

    private ClassMissingException missingClassError(String name) throws IOException {
        List<String> similar =
                SimilarNames.find(name, classNames(), SIMILAR_NAMES_MAX, SIMILARITY_MIN);
        return new ClassMissingException(
                "cannot read from " + server + ": there is no class '" + name + "'; "
                        + (similar.isEmpty()
                                ? "check the option subscribe"
                                : "did you mean " + String.join(" or ", similar) + "?"),
                null);
    }

    private JsonNode inquire(ObjectNode question) throws IOException {
        return repeat(
                () -> {
                    int request = connection.send(Frames.INQUIRE, 0, 0, question);
                    return connection.receiveReply(Frames.INQUIRE, request);
                });
    }

    /**
     * Returns the stored sequences of these classes, with the memory id.
     *
     * @param creates true to create a class whose id is unused; otherwise it is an error
     * @throws ClassMissingException if a class does not exist
     */
    BusExtent getExtent(List<String> names, boolean creates) throws IOException {
        Map<Integer, String> distinct = new HashMap<>();
        for (String name : names) {
            String other = distinct.putIfAbsent(classId(name), name);
            if (other != null) {
                throw new OffsetException(
                        "subscribe has " + other + " and " + name + ", which are the same class of "
                                + server + "; drop one of them");
            }
        }
        return repeat(
                () -> {
                    if (creates) {
                        connection.nameClasses(distinct.keySet());
                    }
                    Map<String, Integer> requests = new LinkedHashMap<>();
                    for (String name : names) {
                        // A sequence that never exists: the reply has the floor and the head.
                        requests.put(name, sendFetch(classId(name), SEQUENCE_MAX, 1));
                    }
                    Map<String, ClassExtent> held = new LinkedHashMap<>();
                    for (Map.Entry<String, Integer> request : requests.entrySet()) {
                        JsonNode reply = receiveFetch(request.getValue());
                        held.put(
                                request.getKey(),
                                new ClassExtent(
                                        reply.path("floor").asLong(), reply.path("head").asLong()));
                    }
                    return new BusExtent(memoryId(), held);
                });
    }

    /**
     * Returns the first message of each class accepted at or after a time; null if there is none yet.
     * Messages accepted shortly before the time may be included.
     *
     * @param times milliseconds since 1970, by class
     */
    Map<String, Long> findFirstSince(Map<String, Long> times) throws IOException {
        Map<String, Long> found = new LinkedHashMap<>();
        for (Map.Entry<String, Long> one : times.entrySet()) {
            int id = classId(one.getKey());
            JsonNode reply =
                    repeat(
                            () -> {
                                ObjectNode request =
                                        Json.object()
                                                .put("count", 1)
                                                .put("time", one.getValue() / 1000.0);
                                return receiveFetch(connection.send(Frames.FETCH, id, 0, request));
                            });
            long first = reply.path("first").asLong();
            found.put(one.getKey(), first < reply.path("head").asLong() ? first : null);
        }
        return found;
    }

    private int sendFetch(int id, long first, long count) throws IOException {
        ObjectNode request = Json.object().put("first", first).put("count", count);
        return connection.send(Frames.FETCH, id, 0, request);
    }

    private JsonNode receiveFetch(int request) throws IOException {
        try {
            return connection.receiveReply(Frames.FETCH, request);
        } catch (RefusedException error) {
            throw classError(error);
        }
    }

    /** Returns the error to throw for a refused class. */
    RuntimeException classError(RefusedException error) throws RefusedException {
        String hint = CLASS_HINTS.get(error.code());
        if (hint == null) {
            throw error;
        }
        return new ClassMissingException(
                "cannot read from " + server + ": " + error.getMessage() + "; " + hint, error);
    }

    @Override
    public void close() {
        connection.close();
    }
}
