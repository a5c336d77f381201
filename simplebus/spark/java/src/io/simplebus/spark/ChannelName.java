package io.simplebus.spark;

import java.nio.charset.StandardCharsets;
import java.util.List;

/** Checks of channels: segments joined by dots, with the messages of the Python client. */
final class ChannelName {
    private static final int BYTES_MAX = 4096;
    private static final int SHOWN_MAX = 80;
    private static final List<String> WILDCARDS = List.of("*", "#", ">");

    private ChannelName() {}

    /**
     * Returns a channel that messages can be published to.
     *
     * @throws IllegalArgumentException if it is not legal
     */
    static String check(String name) {
        int number = 0;
        for (String segment : checkSegments(name, "channel")) {
            number++;
            if (isWildcard(segment)) {
                throw new IllegalArgumentException(
                        "channel " + shorten(name) + ": segment " + number + " is the wildcard "
                                + segment + ", which only a pattern may hold");
            }
        }
        return name;
    }

    static boolean isWildcard(String segment) {
        return WILDCARDS.contains(segment);
    }

    /**
     * Returns the segments of a channel or pattern.
     *
     * @param what {@code channel} or {@code pattern}, for the error message
     */
    static String[] checkSegments(String text, String what) {
        if (text.isEmpty()) {
            throw new IllegalArgumentException(
                    what + " is empty, expected segments joined by dots, such as orders.eu");
        }
        if (text.getBytes(StandardCharsets.UTF_8).length > BYTES_MAX) {
            throw new IllegalArgumentException(
                    what + " " + shorten(text) + " of " + text.codePointCount(0, text.length())
                            + " characters is too long, expected at most " + BYTES_MAX
                            + " bytes in UTF-8");
        }
        String[] segments = text.split("\\.", -1);
        for (int number = 1; number <= segments.length; number++) {
            for (int one : segments[number - 1].codePoints().toArray()) {
                if (one <= ' ' || one == 0x7f || Character.getType(one) == Character.SURROGATE) {
                    throw new IllegalArgumentException(
                            what + " " + shorten(text) + ": segment " + number
                                    + " holds the character U+" + String.format("%04X", one)
                                    + ", expected no white space, control character or surrogate");
                }
            }
        }
        for (int number = 1; number <= segments.length; number++) {
            if (segments[number - 1].isEmpty()) {
                throw new IllegalArgumentException(
                        what + " " + shorten(text) + ": segment " + number + " of "
                                + segments.length
                                + " is empty, expected at least one character in each");
            }
        }
        return segments;
    }

    static String shorten(String text) {
        return "'" + (text.length() <= SHOWN_MAX ? text : text.substring(0, SHOWN_MAX - 1) + "…") + "'";
    }
}
