package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.simplebus.client.Json;
import java.io.IOException;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.sql.connector.read.streaming.Offset;

/**
 * Offsets of a query: the next sequence to read, by server and class.
 *
 * <p>Spark stores them in the checkpoint in the form and the text of the Python source:
 *
 * <pre>{@code
 * {"10.0.0.1:8888": {"": "5b0e…", "7": 120, "orders": 4},
 *  "query": {"id": "9c41…", "durable": "spark 9c41…", "began": {"10.0.0.1:8888": {…}}}}
 * }</pre>
 */
final class Offsets extends Offset {
    private static final String MEMORY = "";
    private static final String QUERY = "query";

    private final Map<String, ServerOffsets> servers;
    private final QueryIdentity query;

    /** @param query identity of the query; null for a checkpoint from before identities */
    Offsets(Map<String, ServerOffsets> servers, QueryIdentity query) {
        this.servers = servers;
        this.query = query;
    }

    Map<String, ServerOffsets> servers() {
        return servers;
    }

    /** Returns the identity of the query, or null. */
    QueryIdentity query() {
        return query;
    }

    @Override
    public String json() {
        ObjectNode found = toJson(servers);
        if (query != null) {
            ObjectNode shown = found.putObject(QUERY).put("id", query.id());
            if (!query.durable().isEmpty()) {
                shown.put("durable", query.durable());
            }
            if (!query.startOffsets().isEmpty()) {
                shown.set("began", toJson(query.startOffsets()));
            }
        }
        return Json.dump(found);
    }

    private static ObjectNode toJson(Map<String, ServerOffsets> servers) {
        ObjectNode found = Json.object();
        new TreeMap<>(servers)
                .forEach(
                        (server, position) -> {
                            ObjectNode shown = found.putObject(server);
                            new TreeMap<>(position.classes()).forEach(shown::put);
                            if (!position.memoryId().isEmpty()) {
                                shown.put(MEMORY, position.memoryId());
                            }
                        });
        return found;
    }

    /**
     * Parses the JSON of a checkpoint.
     *
     * @throws OffsetException if it is not valid
     */
    static Offsets parse(String text) {
        JsonNode given;
        try {
            given = Json.parse(text);
        } catch (IOException error) {
            throw new OffsetException(
                    "the checkpoint has the offset " + text + ", expected sequences by server and class");
        }
        JsonNode query = given.get(QUERY);
        return new Offsets(parseServers(given), query == null ? null : parseQuery(query));
    }

    private static Map<String, ServerOffsets> parseServers(JsonNode given) {
        Map<String, ServerOffsets> found = new TreeMap<>();
        for (Map.Entry<String, JsonNode> server : given.properties()) {
            if (server.getKey().equals(QUERY)) {
                continue;
            }
            if (!server.getValue().isObject()) {
                throw new OffsetException(
                        "the checkpoint has " + server.getValue() + " for " + server.getKey()
                                + ", expected sequences by class");
            }
            Map<String, Long> classes = new TreeMap<>();
            for (Map.Entry<String, JsonNode> one : server.getValue().properties()) {
                if (!one.getKey().equals(MEMORY)) {
                    JsonNode value = one.getValue();
                    classes.put(
                            one.getKey(),
                            OffsetSpec.checkSequence(value, server.getKey(), one.getKey(), 0));
                }
            }
            String memoryId = server.getValue().path(MEMORY).asText();
            found.put(server.getKey(), new ServerOffsets(memoryId, classes));
        }
        return found;
    }

    private static QueryIdentity parseQuery(JsonNode given) {
        JsonNode durable = given.path("durable");
        JsonNode began = given.path("began");
        if (!given.path("id").isTextual()
                || !(durable.isMissingNode() || durable.isTextual())
                || !(began.isMissingNode() || began.isObject())) {
            throw new OffsetException(
                    "the checkpoint has the query " + given
                            + ", expected an id, a durable and start offsets");
        }
        return new QueryIdentity(given.get("id").asText(), durable.asText(), parseServers(began));
    }
}
