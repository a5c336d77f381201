package io.simplebus.spark;

import java.io.Serializable;

/**
 * Pattern of channels: segments joined by dots. {@code *} is one segment; at the end, {@code #} is
 * zero or more segments and {@code >} one or more.
 */
record ChannelPattern(String text) implements Serializable {
    private static final int BYTES_MAX = 4096;
    private static final int SEGMENTS_MAX = 128;

    /**
     * Checks a pattern.
     *
     * @throws IllegalArgumentException if it is not legal
     */
    static ChannelPattern parse(String text) {
        String[] segments = text.split("\\.", -1);
        boolean hasWildcards = false;
        for (int number = 0; number < segments.length; number++) {
            String segment = segments[number];
            boolean isTail = segment.equals("#") || segment.equals(">");
            hasWildcards |= isTail || segment.equals("*");
            if (segment.isEmpty()
                    || segment.chars().anyMatch(one -> one <= ' ' || one == 0x7f)
                    || isTail && number < segments.length - 1) {
                throw new IllegalArgumentException(
                        "pattern '" + text + "': segment " + (number + 1) + " of " + segments.length
                                + " is '" + segment + "', expected text without spaces; # and > may "
                                + "only be the last segment");
            }
        }
        if (text.getBytes(java.nio.charset.StandardCharsets.UTF_8).length > BYTES_MAX
                || hasWildcards && segments.length > SEGMENTS_MAX) {
            throw new IllegalArgumentException(
                    "pattern '" + text.substring(0, 80) + "…' is too long, expected at most "
                            + BYTES_MAX + " bytes, and " + SEGMENTS_MAX
                            + " segments if some are wildcards");
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
