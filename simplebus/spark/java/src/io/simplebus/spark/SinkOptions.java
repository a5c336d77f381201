package io.simplebus.spark;

import java.io.Serializable;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * Options of the sink. Their names are in {@link OptionNames}.
 *
 * @param server name of the bus, {@code host:port}
 * @param className class of rows without one: an id in digits or a name; empty for none
 * @param channel channel of rows without one; empty for none
 * @param timeoutSeconds time for which connecting to the bus is retried
 * @param isJson true if values of any type are encoded as JSON text
 * @param publisher name of a batch write, whose rows are stored once per name; empty for a new name
 */
record SinkOptions(
        String server,
        String className,
        String channel,
        double timeoutSeconds,
        boolean isJson,
        String publisher)
        implements Serializable {
    /**
     * Limit of the option publisher: a task adds its partition and the memory id of the bus, and a bus
     * accepts names of 200 characters.
     */
    private static final int PUBLISHER_CHARACTERS_MAX = 128;

    /**
     * Parses options.
     *
     * @throws IllegalArgumentException with the option's name, its value and the expected one
     */
    static SinkOptions parse(Map<String, String> options) {
        OptionReader reader = new OptionReader(options, OptionNames.SINK);
        List<String> servers =
                reader.required(
                        reader.has("path") && !reader.has("servers") ? "path" : "servers",
                        SourceOptions::parseServers);
        if (servers.size() > 1) {
            throw new IllegalArgumentException(
                    "expected one bus in servers of a sink, got " + String.join(", ", servers));
        }
        List<String> classes = reader.get("class", List.of(""), SourceOptions::parseClasses);
        if (classes.size() > 1) {
            throw new IllegalArgumentException(
                    "expected one class in the option class, got " + String.join(", ", classes));
        }
        return new SinkOptions(
                servers.get(0),
                classes.get(0),
                reader.get("channel", "", String::strip),
                reader.get("timeout", SourceOptions.TIMEOUT_SECONDS, OptionReader::parseSeconds),
                reader.get("valueFormat", false, SinkOptions::parseFormat),
                reader.get("publisher", "", SinkOptions::parsePublisher));
    }

    /**
     * Checks that a stream can be written with these options.
     *
     * @throws IllegalArgumentException if not
     */
    void checkStream() {
        if (!publisher.isEmpty()) {
            throw new IllegalArgumentException(
                    "the option publisher is '" + publisher + "', but a stream already stores each row "
                            + "once; expected publisher for a batch only, also one of foreachBatch");
        }
    }

    private static String parsePublisher(String text) {
        String name = text.strip();
        int length = name.codePointCount(0, name.length());
        if (length < 1 || length > PUBLISHER_CHARACTERS_MAX) {
            throw new IllegalArgumentException(
                    "expected a name of 1 to " + PUBLISHER_CHARACTERS_MAX + " characters");
        }
        return name;
    }

    private static boolean parseFormat(String text) {
        String word = text.strip().toLowerCase(Locale.ROOT);
        if (!word.equals("bytes") && !word.equals("json")) {
            throw new IllegalArgumentException("expected bytes or json");
        }
        return word.equals("json");
    }
}
