package io.simplebus.client;

import java.io.ByteArrayOutputStream;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.List;

/** Content of an envelope in front of the payload, before byte stuffing. */
public final class EnvelopePrefix {
    private static final int TEXT_BYTES_MAX = 0xFFFF;
    private static final BigInteger MILLISECONDS_MAX = BigInteger.ONE.shiftLeft(64).subtract(BigInteger.ONE);

    private EnvelopePrefix() {}

    /**
     * Encodes the fields of a message.
     *
     * @param channel legal channel; empty for none
     * @param key empty for none
     * @param headerTexts names and values in turn, as UTF-8
     * @param expiresMilliseconds unsigned; null for never
     * @return the prefix; null without any field
     * @throws IllegalArgumentException if the key or the headers are too long
     */
    public static byte[] encode(
            String channel, byte[] key, List<byte[]> headerTexts, Long expiresMilliseconds) {
        int fields =
                (expiresMilliseconds == null ? 0 : Frames.EXPIRES)
                        | (channel.isEmpty() ? 0 : Frames.CHANNEL)
                        | (key.length == 0 ? 0 : Frames.KEY)
                        | (headerTexts.isEmpty() ? 0 : Frames.HEADERS);
        if (fields == 0) {
            return null;
        }
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        content.write(fields);
        if (expiresMilliseconds != null) {
            content.writeBytes(ByteBuffer.allocate(Long.BYTES).putLong(expiresMilliseconds).array());
        }
        if (!channel.isEmpty()) {
            writeText(content, channel.getBytes(StandardCharsets.UTF_8));
        }
        if (key.length > TEXT_BYTES_MAX) {
            throw new IllegalArgumentException(
                    "a key has at most " + TEXT_BYTES_MAX + " bytes, got one of " + key.length);
        }
        if (key.length > 0) {
            writeText(content, key);
        }
        if (!headerTexts.isEmpty()) {
            writeHeaders(content, headerTexts);
        }
        return content.toByteArray();
    }

    private static void writeHeaders(ByteArrayOutputStream content, List<byte[]> texts) {
        long size = 0;
        for (byte[] text : texts) {
            size += text.length + 2;
        }
        if (size > TEXT_BYTES_MAX) {
            throw new IllegalArgumentException(
                    "headers have at most " + TEXT_BYTES_MAX + " bytes together, with 4 bytes more for "
                            + "each; got " + texts.size() / 2 + " headers of " + size + " bytes");
        }
        writeLength(content, (int) size);
        for (byte[] text : texts) {
            writeText(content, text);
        }
    }

    private static void writeText(ByteArrayOutputStream content, byte[] text) {
        writeLength(content, text.length);
        content.writeBytes(text);
    }

    private static void writeLength(ByteArrayOutputStream content, int length) {
        content.write(length >>> 8);
        content.write(length);
    }

    /**
     * Returns seconds as whole milliseconds, limited to 64 bits, unsigned.
     *
     * @throws IllegalArgumentException for a negative number
     */
    public static long toMilliseconds(double seconds) {
        if (!(seconds >= 0)) {
            throw new IllegalArgumentException("expiry must be seconds from 0 on, got " + seconds);
        }
        double milliseconds = Math.rint(seconds * 1000);
        return milliseconds >= MILLISECONDS_MAX.doubleValue()
                ? MILLISECONDS_MAX.longValue()
                : new java.math.BigDecimal(milliseconds).toBigInteger().longValue();
    }

    /** Returns seconds as whole milliseconds, as {@link #toMilliseconds(double)}. */
    public static long toMilliseconds(long seconds) {
        if (seconds < 0) {
            throw new IllegalArgumentException("expiry must be seconds from 0 on, got " + seconds);
        }
        return BigInteger.valueOf(seconds)
                .multiply(BigInteger.valueOf(1000))
                .min(MILLISECONDS_MAX)
                .longValue();
    }
}
