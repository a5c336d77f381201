package io.simplebus.spark;

import io.simplebus.client.EnvelopePrefix;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Class and metadata of rows. Consecutive rows often have the same ones, which are then not encoded
 * again.
 */
final class RowMetadata {
    private static final byte[] NO_KEY = new byte[0];

    private final SinkColumns columns;
    private final SinkOptions options;
    private final DataType[] types;
    private final JsonEncoder json;
    private boolean isFirst = true;
    private boolean hadHeaders;
    private Object classOf;
    private Object channel;
    private byte[] key;
    private Object expiry;
    private String className;
    private byte[] prefix;

    RowMetadata(SinkColumns columns, SinkOptions options) {
        this.columns = columns;
        this.options = options;
        this.types = new DataType[columns.schema().size()];
        for (int ordinal = 0; ordinal < types.length; ordinal++) {
            types[ordinal] = columns.schema().apply(ordinal).dataType();
        }
        this.json = options.isJson() ? new JsonEncoder(types[columns.value()]) : null;
    }

    /** Returns the class: an id in digits, or a name. */
    String className() {
        return className;
    }

    /** Returns the envelope in front of the payload; null for none. */
    byte[] prefix() {
        return prefix;
    }

    /** Returns the payload of a row with this number in its task. */
    byte[] payload(InternalRow row, long number) {
        if (row.isNullAt(columns.value())) {
            throw new RowException("row " + number + " has no value, expected bytes");
        }
        return json == null
                ? bytesOf(row, columns.value())
                : json.encode(valueOf(row, columns.value()));
    }

    /**
     * Reads a row.
     *
     * @param number number of the row in its task, for error messages
     * @return false if class and metadata equal those of the previous row
     * @throws RowException if they are invalid
     */
    boolean read(InternalRow row, long number) {
        Object newClass = valueOf(row, columns.classOf());
        Object newChannel = valueOf(row, columns.channel());
        byte[] newKey = bytesOf(row, columns.key());
        Object newExpiry = valueOf(row, columns.expiry());
        boolean hasHeaders = columns.headers() >= 0 && !row.isNullAt(columns.headers());
        if (!isFirst
                && !hasHeaders
                && !hadHeaders
                && Objects.equals(newClass, classOf)
                && Objects.equals(newChannel, channel)
                && Arrays.equals(newKey, key)
                && Objects.equals(newExpiry, expiry)) {
            return false;
        }
        isFirst = false;
        hadHeaders = hasHeaders;
        classOf = copyOf(newClass);
        channel = copyOf(newChannel);
        key = newKey;
        expiry = newExpiry;
        className = classOf == null ? options.className() : checkClass(number);
        if (className.isEmpty()) {
            throw new RowException(
                    "row " + number + " has no class, and the option class is not set");
        }
        try {
            prefix = encodePrefix(hasHeaders ? headerTexts(row) : List.of());
        } catch (IllegalArgumentException error) {
            throw new RowException("row " + number + ": " + error.getMessage());
        }
        return true;
    }

    private String checkClass(long number) {
        if (classOf instanceof Number id
                && (id.longValue() < 0 || id.longValue() > SourceOptions.CLASS_ID_MAX)) {
            throw new RowException(
                    "row " + number + " has the class " + id + ", expected an id from 0 to "
                            + SourceOptions.CLASS_ID_MAX + ", or a name");
        }
        return classOf.toString();
    }

    private byte[] encodePrefix(List<byte[]> headerTexts) {
        String name = channel == null ? options.channel() : channel.toString();
        return EnvelopePrefix.encode(
                name.isEmpty() ? "" : ChannelName.check(name),
                key == null ? NO_KEY : key,
                headerTexts,
                expiry == null ? null : milliseconds((Number) expiry));
    }

    private static long milliseconds(Number seconds) {
        return seconds instanceof Double || seconds instanceof Float
                ? EnvelopePrefix.toMilliseconds(seconds.doubleValue())
                : EnvelopePrefix.toMilliseconds(seconds.longValue());
    }

    /** Returns a value; null for none. It is valid until Spark reuses the row. */
    private Object valueOf(InternalRow row, int ordinal) {
        return ordinal < 0 || row.isNullAt(ordinal) ? null : row.get(ordinal, types[ordinal]);
    }

    private static Object copyOf(Object value) {
        return value instanceof UTF8String text ? text.clone() : value;
    }

    /** Returns the bytes of a text or binary; null for none. */
    private byte[] bytesOf(InternalRow row, int ordinal) {
        if (ordinal < 0 || row.isNullAt(ordinal)) {
            return null;
        }
        return types[ordinal] instanceof BinaryType
                ? row.getBinary(ordinal)
                : row.getUTF8String(ordinal).getBytes();
    }

    /** Returns names and values in turn. */
    private List<byte[]> headerTexts(InternalRow row) {
        List<byte[]> texts = new ArrayList<>();
        if (types[columns.headers()] instanceof ArrayType type) {
            DataType valueType = ((StructType) type.elementType()).apply(1).dataType();
            ArrayData headers = row.getArray(columns.headers());
            for (int number = 0; number < headers.numElements(); number++) {
                if (headers.isNullAt(number)) {
                    throw new IllegalArgumentException("a header is two texts, got null");
                }
                InternalRow header = headers.getStruct(number, 2);
                addHeader(
                        texts,
                        header.isNullAt(0) ? null : header.getUTF8String(0).getBytes(),
                        header.isNullAt(1)
                                ? null
                                : valueType instanceof StringType
                                        ? header.getUTF8String(1).getBytes()
                                        : header.getBinary(1));
            }
        } else {
            MapData headers = row.getMap(columns.headers());
            for (int number = 0; number < headers.numElements(); number++) {
                addHeader(
                        texts,
                        headers.keyArray().getUTF8String(number).getBytes(),
                        headers.valueArray().isNullAt(number)
                                ? null
                                : headers.valueArray().getUTF8String(number).getBytes());
            }
        }
        return texts;
    }

    private static void addHeader(List<byte[]> texts, byte[] name, byte[] value) {
        if (name == null || value == null) {
            throw new IllegalArgumentException("a header is two texts, got null");
        }
        texts.add(name);
        texts.add(value);
        try {
            StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(value));
        } catch (CharacterCodingException error) {
            throw new IllegalArgumentException(
                    "the value of the header " + new String(name, StandardCharsets.UTF_8)
                            + " is not utf-8, expected a text",
                    error);
        }
    }
}
