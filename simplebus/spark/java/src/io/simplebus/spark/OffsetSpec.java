package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import io.simplebus.client.Json;
import java.io.IOException;
import java.io.Serializable;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.UnaryOperator;

/**
 * Start or end of a query as a user specifies it.
 *
 * @param option name of the option, for error messages
 * @param word {@code earliest} or {@code latest}; empty for numbers
 * @param byClass numbers by server and class; null for a word, or for one time for all classes
 * @param time milliseconds since 1970 for all classes; -1 for none
 * @param isTime true if the numbers are times
 * @param isStrict true if a time after the last message is an error; otherwise it means the end
 */
record OffsetSpec(
        String option,
        String word,
        Map<String, Map<String, Long>> byClass,
        long time,
        boolean isTime,
        boolean isStrict)
        implements Serializable {
    static final long LATEST = -1;
    static final long EARLIEST = -2;
    static final long MILLISECONDS_MAX = 253_402_300_799_999L;

    static OffsetSpec ofWord(String option, String word) {
        return new OffsetSpec(option, word, null, -1, false, false);
    }

    static OffsetSpec ofTime(String option, long milliseconds, boolean isStrict) {
        return new OffsetSpec(option, "", null, milliseconds, true, isStrict);
    }

    OffsetSpec withSequences(Map<String, Map<String, Long>> sequences) {
        return new OffsetSpec(option, "", sequences, -1, false, false);
    }

    boolean isEarliest() {
        return word.equals("earliest");
    }

    /**
     * Parses a word or JSON by server and class; -1 is latest and -2 is earliest.
     *
     * @param canBeEarliest false for an end
     * @param canBeLatest false for the start of a batch
     */
    static OffsetSpec parseOffsets(
            String option,
            String text,
            UnaryOperator<String> serverName,
            UnaryOperator<String> className,
            boolean canBeEarliest,
            boolean canBeLatest) {
        String known = text.strip().toLowerCase(Locale.ROOT);
        if (known.equals("latest") && canBeLatest || known.equals("earliest") && canBeEarliest) {
            return ofWord(option, known);
        }
        if (known.equals("latest")) {
            throw new OffsetException(
                    "expected \"earliest\" or JSON; \"latest\" is not a possible start of a batch");
        }
        if (known.equals("earliest")) {
            throw new OffsetException(
                    "expected \"latest\" or JSON; \"earliest\" is not a possible end");
        }
        long lowest = canBeEarliest ? EARLIEST : LATEST;
        Map<String, Map<String, Long>> numbers =
                parseByClass(
                        text,
                        serverName,
                        className,
                        (value, server, name) -> checkSequence(value, server, name, lowest),
                        "expected earliest, latest or JSON such as {\"127.0.0.1:8888\": {\"7\": 120}}");
        return new OffsetSpec(option, "", numbers, -1, false, false);
    }

    /** Parses JSON of milliseconds since 1970, by server and class. */
    static OffsetSpec parseTimes(
            String option,
            String text,
            UnaryOperator<String> serverName,
            UnaryOperator<String> className,
            boolean isStrict) {
        Map<String, Map<String, Long>> numbers =
                parseByClass(
                        text,
                        serverName,
                        className,
                        OffsetSpec::checkMilliseconds,
                        "expected JSON such as {\"127.0.0.1:8888\": {\"7\": 1763740800000}}");
        return new OffsetSpec(option, "", numbers, -1, true, isStrict);
    }

    static long parseMilliseconds(String text) {
        String word = text.strip();
        if (!word.matches("\\d{1,18}") || Long.parseLong(word) > MILLISECONDS_MAX) {
            throw new OffsetException(
                    "expected milliseconds since 1970, a whole number from 0 to " + MILLISECONDS_MAX);
        }
        return Long.parseLong(word);
    }

    private interface NumberCheck {
        long check(JsonNode value, String server, String name);
    }

    private static Map<String, Map<String, Long>> parseByClass(
            String text,
            UnaryOperator<String> serverName,
            UnaryOperator<String> className,
            NumberCheck number,
            String expected) {
        JsonNode given;
        try {
            given = Json.parse(text);
        } catch (IOException error) {
            throw new OffsetException("not valid JSON; " + expected);
        }
        if (given == null || !given.isObject() || given.isEmpty()) {
            throw new OffsetException("the JSON has no server; " + expected);
        }
        Map<String, Map<String, Long>> found = new LinkedHashMap<>();
        for (Map.Entry<String, JsonNode> server : given.properties()) {
            if (!server.getValue().isObject()) {
                throw new OffsetException(
                        "the JSON has " + server.getValue() + " for " + server.getKey() + "; " + expected);
            }
            for (Map.Entry<String, JsonNode> one : server.getValue().properties()) {
                if (!one.getKey().isEmpty()) {
                    found.computeIfAbsent(
                                    serverName.apply(server.getKey()), key -> new LinkedHashMap<>())
                            .put(
                                    className.apply(one.getKey()),
                                    number.check(one.getValue(), server.getKey(), one.getKey()));
                }
            }
        }
        return found;
    }

    static long checkSequence(JsonNode value, String server, String name, long lowest) {
        if (!value.isIntegralNumber() || !value.canConvertToLong() || value.asLong() < lowest) {
            String special = lowest == EARLIEST ? ", -1 for latest or -2 for earliest" : "";
            throw new OffsetException(
                    "class " + name + " at " + server + " has the offset " + value
                            + ", expected a sequence >= 0"
                            + (lowest == LATEST ? ", or -1 for latest" : special));
        }
        return value.asLong();
    }

    private static long checkMilliseconds(JsonNode value, String server, String name) {
        if (!value.isIntegralNumber() || value.asLong(-1) < 0 || value.asLong() > MILLISECONDS_MAX) {
            throw new OffsetException(
                    "class " + name + " at " + server + " has the time " + value
                            + ", expected milliseconds since 1970, a whole number from 0 to "
                            + MILLISECONDS_MAX);
        }
        return value.asLong();
    }

    /** Returns the time for a class. */
    long timeFor(String server, String name) {
        if (byClass == null) {
            return time;
        }
        Long found = byClass.getOrDefault(server, Map.of()).get(name);
        if (found == null) {
            throw missingEntry(server, name, "milliseconds since 1970");
        }
        return found;
    }

    /** Returns the offset for a time after the last message; throws if this spec is strict. */
    long offsetPastEnd(String server, String name) {
        if (!isStrict) {
            return LATEST;
        }
        long milliseconds = timeFor(server, name);
        String when =
                DateTimeFormatter.ofPattern("yyyy-MM-dd'T'HH:mm:ss.SSS'+00:00'")
                        .format(Instant.ofEpochMilli(milliseconds).atOffset(ZoneOffset.UTC));
        throw new OffsetException(
                option + " is " + milliseconds + " (" + when + ") for class " + name + " at " + server
                        + ", which stores no message accepted since then; to start with the next message, "
                        + "set the option startingOffsetsByTimestampStrategy to latest");
    }

    private OffsetException missingEntry(String server, String name, String expected) {
        return new OffsetException(
                option + " has no entry for class " + name + " at " + server + "; expected " + expected);
    }

    /** Throws if a server or class is named that the query does not read. */
    void checkNames(Iterable<String> servers, List<String> names) {
        if (byClass == null) {
            return;
        }
        List<String> read = new java.util.ArrayList<>();
        servers.forEach(read::add);
        byClass.forEach(
                (server, classes) -> {
                    if (!read.contains(server)) {
                        String example =
                                "{\"" + read.get(0) + "\": {\"" + names.get(0) + "\": "
                                        + classes.values().iterator().next() + "}}";
                        throw new OffsetException(
                                option + " names the server " + server
                                        + ", which is not read; expected one of "
                                        + String.join(", ", read) + " and its classes, as in "
                                        + example);
                    }
                    for (String name : classes.keySet()) {
                        if (!names.contains(name)) {
                            throw new OffsetException(
                                    option + " names class " + name + " at " + server
                                            + ", which is not subscribed to; subscribe is "
                                            + String.join(", ", names));
                        }
                    }
                });
    }

    /**
     * Resolves offsets to sequences. Sequences below a floor stay; the planner reports the loss.
     *
     * @throws OffsetException if an offset is beyond the head, missing, or of a server or class that
     *     is not read
     */
    Map<String, ServerOffsets> resolve(Map<String, BusExtent> extents) {
        Map<String, ServerOffsets> found = new LinkedHashMap<>();
        extents.forEach(
                (server, extent) -> {
                    checkNames(extents.keySet(), List.copyOf(extent.classes().keySet()));
                    Map<String, Long> sequences = new LinkedHashMap<>();
                    extent.classes()
                            .forEach((name, held) -> sequences.put(name, resolve(server, name, held)));
                    found.put(server, new ServerOffsets(extent.memoryId(), sequences));
                });
        return found;
    }

    private long resolve(String server, String name, ClassExtent held) {
        Long sequence;
        if (!word.isEmpty()) {
            sequence = isEarliest() ? EARLIEST : LATEST;
        } else {
            sequence = byClass.getOrDefault(server, Map.of()).get(name);
        }
        if (sequence == null) {
            throw missingEntry(server, name, "a sequence, -1 for latest or -2 for earliest");
        }
        if (sequence > held.head()) {
            throw new OffsetException(
                    option + " is " + sequence + " for class " + name + " at " + server
                            + ", beyond its end: the next message there will be " + held.head());
        }
        if (sequence == LATEST) {
            return held.head();
        }
        return sequence == EARLIEST ? held.floor() : sequence;
    }
}
