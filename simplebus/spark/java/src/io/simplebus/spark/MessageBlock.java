package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import io.simplebus.client.Frames;
import io.simplebus.client.MessageReceiver;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;

/**
 * Messages of one reply to a Fetch, as slices of the receive buffer.
 *
 * <p>Nothing is copied: columns read the fields of a message where they were received. A block is
 * filled again for the next reply.
 */
final class MessageBlock implements MessageReceiver {
    /** Values of timestampType: set by the publisher, or accepted by the bus. */
    static final byte CREATE_TIME = 0;

    static final byte ACCEPT_TIME = 1;

    private static final int INITIAL_ROWS = 4096;
    private static final int TIME_BYTES = 8;
    private static final int LENGTH_BYTES = 2;
    private static final int CACHED_CHANNELS_MAX = 4096;
    private static final double MICROSECONDS = 1e6;

    private final RowFilter filter;
    private final boolean needsTimes;
    private final Map<String, Boolean> acceptedChannels = new HashMap<>();

    private final Slices values = new Slices(INITIAL_ROWS);
    private final Slices keys = new Slices(INITIAL_ROWS);
    private final Slices channels = new Slices(INITIAL_ROWS);
    private final Slices headers = new Slices(INITIAL_ROWS);
    private long[] timestamps = new long[INITIAL_ROWS];
    private byte[] timestampTypes = new byte[INITIAL_ROWS];
    private int[] indexes = new int[INITIAL_ROWS];
    private byte[] bytes;
    private long first;
    private int count;
    private boolean hasEnvelopes;
    private int damagedRow;

    /**
     * @param filter selects messages
     * @param needsTimes true if a column of timestamps is read
     */
    MessageBlock(RowFilter filter, boolean needsTimes) {
        this.filter = filter;
        this.needsTimes = needsTimes || filter.selectsByTimestamp();
    }

    /** Discards the messages, before the next reply is received. */
    void clear() {
        count = 0;
        hasEnvelopes = false;
        damagedRow = -1;
    }

    boolean needsTimes() {
        return needsTimes;
    }

    int count() {
        return count;
    }

    byte[] bytes() {
        return bytes;
    }

    /** Returns true if any message of the reply may have a key, a channel or headers. */
    boolean hasEnvelopes() {
        return hasEnvelopes;
    }

    Slices values() {
        return values;
    }

    Slices keys() {
        return keys;
    }

    Slices channels() {
        return channels;
    }

    Slices headers() {
        return headers;
    }

    long sequence(int row) {
        return first + indexes[row];
    }

    /** Returns the timestamp of a message, in microseconds since 1970. */
    long timestamp(int row) {
        return timestamps[row];
    }

    int timestampType(int row) {
        return timestampTypes[row];
    }

    @Override
    public void add(byte[] buffer, boolean isEnvelope, int begin, int end) {
        bytes = buffer;
        if (count == timestamps.length) {
            grow();
        }
        if (isEnvelope) {
            addEnvelope(begin, end);
        } else {
            values.set(count, begin, end);
            if (hasEnvelopes) {
                clearFields(count, count + 1);
            }
        }
        count++;
    }

    private void grow() {
        int capacity = 2 * count;
        for (Slices one : new Slices[] {values, keys, channels, headers}) {
            one.grow(capacity);
        }
        timestamps = java.util.Arrays.copyOf(timestamps, capacity);
        timestampTypes = java.util.Arrays.copyOf(timestampTypes, capacity);
        indexes = java.util.Arrays.copyOf(indexes, capacity);
    }

    private void clearFields(int from, int to) {
        keys.clear(from, to);
        channels.clear(from, to);
        headers.clear(from, to);
        java.util.Arrays.fill(timestampTypes, from, to, ACCEPT_TIME);
    }

    private void addEnvelope(int begin, int end) {
        if (!hasEnvelopes) {
            clearFields(0, count);
            hasEnvelopes = true;
        }
        clearFields(count, count + 1);
        int fields = begin < end ? bytes[begin] & 0xFF : Frames.RESERVED;
        int at = begin + 1;
        if ((fields & Frames.PUBLISHED) != 0 && at + TIME_BYTES <= end) {
            timestamps[count] = Frames.readLong(bytes, at);
            timestampTypes[count] = CREATE_TIME;
        }
        at +=
                TIME_BYTES
                        * Integer.bitCount(
                                fields & (Frames.PUBLISHED | Frames.EXPIRES | Frames.NOT_BEFORE));
        if ((fields & Frames.CHANNEL) != 0) {
            at = addField(channels, at, end);
        }
        if ((fields & Frames.KEY) != 0) {
            at = addField(keys, at, end);
        }
        if ((fields & Frames.HEADERS) != 0) {
            at = addField(headers, at, end);
        }
        if ((at > end || (fields & Frames.RESERVED) != 0) && damagedRow < 0) {
            damagedRow = count;
        }
        values.set(count, Math.min(at, end), end);
    }

    /** Reads a field with its length and returns the index behind it. */
    private int addField(Slices field, int at, int end) {
        if (at + LENGTH_BYTES > end) {
            return end + 1;
        }
        int begin = at + LENGTH_BYTES;
        int fieldEnd = begin + Frames.readShort(bytes, at);
        if (fieldEnd <= end) {
            field.set(count, begin, fieldEnd);
        }
        return fieldEnd;
    }

    /**
     * Completes the block with the reply, and selects messages.
     *
     * @param last end of the range that is read; later messages are dropped
     * @param rowsMax maximum number of rows
     */
    void complete(JsonNode reply, long last, long rowsMax) {
        first = reply.path("first").asLong();
        if (damagedRow >= 0) {
            throw new IllegalStateException(
                    "the bus sent a bad envelope with message " + (first + damagedRow));
        }
        count = (int) Math.max(0, Math.min(count, last - first));
        for (int row = 0; row < count; row++) {
            indexes[row] = row;
        }
        if (needsTimes) {
            setAcceptanceTimes(reply.path("times"));
        }
        if (filter.selectsByChannel() || filter.selectsByTimestamp()) {
            select();
        }
        count = (int) Math.min(count, rowsMax);
    }

    private void setAcceptanceTimes(JsonNode times) {
        if (!hasEnvelopes) {
            java.util.Arrays.fill(timestampTypes, 0, count, ACCEPT_TIME);
        }
        int step = 0;
        long until = times.isEmpty() ? first : times.get(0).get(0).asLong();
        long time = 0;
        boolean isKnown = false;
        for (int row = 0; row < count; row++) {
            while (step < times.size() && until <= first + row) {
                time = (long) Math.rint(times.get(step).get(1).asDouble() * MICROSECONDS);
                isKnown = true;
                step++;
                until = step < times.size() ? times.get(step).get(0).asLong() : Long.MAX_VALUE;
            }
            if (timestampTypes[row] == ACCEPT_TIME) {
                if (!isKnown) {
                    throw new IllegalStateException(
                            "the bus sent no acceptance time for message " + (first + row));
                }
                timestamps[row] = time;
            }
        }
    }

    private void select() {
        int kept = 0;
        for (int row = 0; row < count; row++) {
            if (isSelected(row)) {
                values.move(row, kept);
                keys.move(row, kept);
                channels.move(row, kept);
                headers.move(row, kept);
                timestamps[kept] = timestamps[row];
                timestampTypes[kept] = timestampTypes[row];
                indexes[kept] = row;
                kept++;
            }
        }
        count = kept;
    }

    private boolean isSelected(int row) {
        if (filter.selectsByTimestamp()
                && (timestamps[row] < filter.timestampMin()
                        || timestamps[row] > filter.timestampMax())) {
            return false;
        }
        if (!filter.selectsByChannel()) {
            return true;
        }
        String channel =
                hasEnvelopes
                        ? new String(
                                bytes,
                                channels.begins[row],
                                channels.ends[row] - channels.begins[row],
                                StandardCharsets.UTF_8)
                        : "";
        if (acceptedChannels.size() >= CACHED_CHANNELS_MAX) {
            acceptedChannels.clear();
        }
        return acceptedChannels.computeIfAbsent(channel, filter::acceptsChannel);
    }
}
