package io.simplebus.spark;

import java.io.Serializable;
import java.util.List;
import java.util.Set;

/**
 * Selection of messages within a task.
 *
 * @param patterns patterns of the option {@code channels}; empty for every message
 * @param channels channels that pushed filters select; null for all
 * @param timestampMin lowest selected timestamp, in microseconds since 1970
 * @param timestampMax highest selected timestamp
 * @param limit maximum number of rows of a task
 */
record RowFilter(
        List<ChannelPattern> patterns,
        Set<String> channels,
        long timestampMin,
        long timestampMax,
        long limit)
        implements Serializable {
    static RowFilter of(List<ChannelPattern> patterns) {
        return new RowFilter(patterns, null, Long.MIN_VALUE, Long.MAX_VALUE, Long.MAX_VALUE);
    }

    boolean selectsByChannel() {
        return !patterns.isEmpty() || channels != null;
    }

    boolean selectsByTimestamp() {
        return timestampMin > Long.MIN_VALUE || timestampMax < Long.MAX_VALUE;
    }

    /** Returns true if messages on a channel are selected; empty for messages without a channel. */
    boolean acceptsChannel(String channel) {
        // A filter on the column never selects null, which messages without a channel have.
        if (channels != null && (channel.isEmpty() || !channels.contains(channel))) {
            return false;
        }
        return patterns.isEmpty() || patterns.stream().anyMatch(one -> one.matches(channel));
    }
}
