package io.simplebus.client;

/** Frame types, header layout and delimiter of the binary protocol. */
public final class Frames {
    public static final byte HEARTBEAT = '0';
    public static final byte MESSAGE = '1';
    public static final byte SUBSCRIBE = '2';
    public static final byte CONNECT = '4';
    public static final byte ENVELOPE = '5';
    public static final byte CONFIRM = '6';
    public static final byte UNSUBSCRIBE = 'U';
    public static final byte FETCH = 'F';
    public static final byte INQUIRE = 'I';
    public static final byte ERROR = 'E';

    public static final int HEADER_BYTES = 9;
    public static final int DELIMITER_BYTES = 4;

    /** Bits of the first byte of an envelope, in the order of the fields. */
    public static final int PUBLISHED = 1;
    public static final int EXPIRES = 2;
    public static final int NOT_BEFORE = 4;
    public static final int CHANNEL = 8;
    public static final int KEY = 16;
    public static final int HEADERS = 32;
    public static final int RESERVED = 0b1100_0000;

    private static final int LESS_THAN = '<';
    private static final int CARRIAGE_RETURN = '\r';
    private static final int LINE_FEED = '\n';
    private static final int GREATER_THAN = '>';

    /** True for the bytes of the delimiter, and for the NUL of byte stuffing. */
    private static final boolean[] IS_DELIMITER_BYTE = new boolean[256];

    static {
        for (int one : new int[] {LESS_THAN, CARRIAGE_RETURN, LINE_FEED, GREATER_THAN, 0}) {
            IS_DELIMITER_BYTE[one] = true;
        }
    }

    private Frames() {}

    /** Returns the index of the first delimiter in {@code bytes[from..end)}; -1 if there is none. */
    static int indexOfDelimiter(byte[] bytes, int from, int end) {
        return indexOf(bytes, from, end, GREATER_THAN);
    }

    /**
     * Removes byte stuffing from {@code bytes[begin..end)} in place.
     *
     * @return the new end
     */
    static int unstuff(byte[] bytes, int begin, int end) {
        int stuffed = indexOf(bytes, begin, end, 0);
        int to = stuffed;
        int from = stuffed;
        while (stuffed >= 0) {
            int next = indexOf(bytes, stuffed + DELIMITER_BYTES, end, 0);
            int count = (next < 0 ? end : next) - from;
            System.arraycopy(bytes, from, bytes, to, DELIMITER_BYTES - 1);
            int rest = count - DELIMITER_BYTES;
            System.arraycopy(
                    bytes, from + DELIMITER_BYTES, bytes, to + DELIMITER_BYTES - 1, rest);
            to += count - 1;
            from += count;
            stuffed = next;
        }
        return to < 0 ? end : to;
    }

    /**
     * Returns the index of the first {@code <}, CR, LF, {@code last}; -1 if there is none.
     *
     * <p>It looks at every fourth byte: if that is another of the four bytes, the end of a match may
     * be that much further. One rare branch for all four is fast, because it is nearly always
     * predicted, whatever the payloads are.
     */
    private static int indexOf(byte[] bytes, int from, int end, int last) {
        int at = from + DELIMITER_BYTES - 1;
        while (at < end) {
            byte found = bytes[at];
            if (!IS_DELIMITER_BYTE[found & 0xFF]) {
                at += DELIMITER_BYTES;
            } else if (found == LINE_FEED) {
                at += 1;
            } else if (found == CARRIAGE_RETURN) {
                at += 2;
            } else if (found == LESS_THAN) {
                at += 3;
            } else if (found == last
                    && bytes[at - 1] == LINE_FEED
                    && bytes[at - 2] == CARRIAGE_RETURN
                    && bytes[at - 3] == LESS_THAN) {
                return at - DELIMITER_BYTES + 1;
            } else {
                at += DELIMITER_BYTES;
            }
        }
        return -1;
    }

    /** Writes a frame header at {@code at}. */
    static void writeHeader(byte[] bytes, int at, byte type, int a, int b, int c) {
        bytes[at] = type;
        bytes[at + 1] = (byte) (a >>> 8);
        bytes[at + 2] = (byte) a;
        bytes[at + 3] = (byte) (b >>> 24);
        bytes[at + 4] = (byte) (b >>> 16);
        bytes[at + 5] = (byte) (b >>> 8);
        bytes[at + 6] = (byte) b;
        bytes[at + 7] = (byte) (c >>> 8);
        bytes[at + 8] = (byte) c;
    }

    /** Writes the delimiter at {@code at}. */
    static void writeDelimiter(byte[] bytes, int at) {
        bytes[at] = LESS_THAN;
        bytes[at + 1] = CARRIAGE_RETURN;
        bytes[at + 2] = LINE_FEED;
        bytes[at + 3] = GREATER_THAN;
    }

    /** Returns a frame. */
    static byte[] encode(byte type, int a, int b, int c, byte[] content) {
        byte[] frame = new byte[HEADER_BYTES + content.length + DELIMITER_BYTES];
        writeHeader(frame, 0, type, a, b, c);
        System.arraycopy(content, 0, frame, HEADER_BYTES, content.length);
        writeDelimiter(frame, HEADER_BYTES + content.length);
        return frame;
    }

    /** Returns the unsigned 16-bit number at {@code at}. */
    public static int readShort(byte[] bytes, int at) {
        return (bytes[at] & 0xFF) << 8 | bytes[at + 1] & 0xFF;
    }

    /** Returns the 32-bit number at {@code at}. */
    public static int readInt(byte[] bytes, int at) {
        return readShort(bytes, at) << 16 | readShort(bytes, at + 2);
    }

    /** Returns the 64-bit number at {@code at}. */
    public static long readLong(byte[] bytes, int at) {
        return (long) readInt(bytes, at) << 32 | readInt(bytes, at + 4) & 0xFFFF_FFFFL;
    }
}
