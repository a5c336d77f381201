package io.simplebus.spark;

import java.io.Serializable;
import java.util.Arrays;

/**
 * Pattern of channels: segments joined by dots. {@code *} is one segment; at the end, {@code #} is
 * zero or more segments and {@code >} one or more.
 */
record ChannelPattern(String text) implements Serializable {
    private static final int SEGMENTS_MAX = 128;

    /**
     * Checks a pattern.
     *
     * @throws IllegalArgumentException if it is not legal
     */
    static ChannelPattern parse(String text) {
        String[] segments = ChannelName.checkSegments(text, "pattern");
        if (segments.length > SEGMENTS_MAX && Arrays.stream(segments).anyMatch(ChannelName::isWildcard)) {
            throw new IllegalArgumentException(
                    "pattern " + ChannelName.shorten(text) + " of " + segments.length
                            + " segments is too long, expected at most " + SEGMENTS_MAX
                            + " if some are wildcards");
        }
        for (int number = 1; number < segments.length; number++) {
            String segment = segments[number - 1];
            if (segment.equals("#") || segment.equals(">")) {
                throw new IllegalArgumentException(
                        "pattern " + ChannelName.shorten(text) + ": segment " + number + " of "
                                + segments.length + " is the wildcard " + segment
                                + ", which may only be the last");
            }
        }
        return new ChannelPattern(text);
    }

    /** Returns true if the pattern matches a channel; empty for a message without a channel. */
    boolean matches(String channel) {
        if (channel.isEmpty()) {
            return text.equals("#");
        }
        String[] steps = text.split("\\.", -1);
        String[] segments = channel.split("\\.", -1);
        String last = steps[steps.length - 1];
        boolean hasTail = last.equals("#") || last.equals(">");
        int fixed = hasTail ? steps.length - 1 : steps.length;
        int segmentsMin = last.equals(">") ? steps.length : fixed;
        if (segments.length < segmentsMin || !hasTail && segments.length > fixed) {
            return false;
        }
        for (int number = 0; number < segments.length; number++) {
            if (segments[number].isEmpty()) {
                return false;
            }
            if (number < fixed
                    && !steps[number].equals("*")
                    && !steps[number].equals(segments[number])) {
                return false;
            }
        }
        return true;
    }
}
