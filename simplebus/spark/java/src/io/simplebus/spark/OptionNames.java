package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import io.simplebus.client.Json;
import io.simplebus.client.SimilarNames;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * Names of the options. The table {@code options.json} in the jar is generated from
 * {@code simplebus/spark/option_names.py}.
 */
final class OptionNames {
    static final String BATCH = "batch";
    static final String STREAM = "stream";
    static final String SINK = "sink";

    private static final double SIMILARITY_MIN = 0.5;
    private static final JsonNode TABLE = readTable();

    private OptionNames() {}

    private static JsonNode readTable() {
        try (InputStream input = OptionNames.class.getResourceAsStream("options.json")) {
            return Json.parse(new String(input.readAllBytes(), StandardCharsets.UTF_8));
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Returns the descriptions of the values, by the names of the options of a use. */
    static Map<String, String> expectedValues(String use) {
        Map<String, String> found = new LinkedHashMap<>();
        for (JsonNode option : TABLE.path("options")) {
            for (JsonNode one : option.path("uses")) {
                if (one.asText().equals(use)) {
                    found.put(option.path("name").asText(), option.path("expected").asText());
                }
            }
        }
        return found;
    }

    /** Returns the error message for an option that a use does not have. */
    static String unknownOptionMessage(String name, String use) {
        return "there is no option " + spelling(name) + " here; "
                + hint(name.toLowerCase(Locale.ROOT), use);
    }

    /** Returns the documented spelling of a known name. Spark passes some names in lower case. */
    private static String spelling(String name) {
        for (String list : List.of("options", "kafka")) {
            for (JsonNode option : TABLE.path(list)) {
                String known = option.path("name").asText();
                if (known.equalsIgnoreCase(name)) {
                    return known;
                }
            }
        }
        return name;
    }

    private static String hint(String name, String use) {
        for (JsonNode option : TABLE.path("options")) {
            if (option.path("name").asText().equalsIgnoreCase(name)) {
                JsonNode uses = option.path("uses");
                String owner = uses.size() > 1 ? "the source" : "a " + uses.path(0).asText();
                return "it is an option of " + owner;
            }
        }
        for (JsonNode option : TABLE.path("kafka")) {
            String pattern = option.path("name").asText().toLowerCase(Locale.ROOT);
            String prefix = pattern.substring(0, pattern.length() - 1);
            if (name.equals(pattern) || pattern.endsWith("*") && name.startsWith(prefix)) {
                return option.path("hint").asText();
            }
        }
        Map<String, String> known = new LinkedHashMap<>();
        expectedValues(use).keySet().forEach(one -> known.put(one.toLowerCase(Locale.ROOT), one));
        List<String> similar = SimilarNames.find(name, known.keySet(), 1, SIMILARITY_MIN);
        return similar.isEmpty()
                ? "expected " + String.join(", ", known.values())
                : "did you mean " + known.get(similar.get(0)) + "?";
    }
}
