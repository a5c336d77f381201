package io.simplebus.spark;

import java.io.CharArrayWriter;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.json.JSONOptions;
import org.apache.spark.sql.catalyst.json.JacksonGenerator;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.BooleanType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.NumericType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimestampNTZType;
import org.apache.spark.sql.types.TimestampType;
import scala.jdk.javaapi.CollectionConverters;

/** Encoder of values as JSON texts, by Spark's {@code to_json}. Timestamps are in UTC. */
final class JsonEncoder {
    private static final String SECONDS = "yyyy-MM-dd'T'HH:mm:ss.SSSSSS";
    private static final Map<String, String> OPTIONS =
            Map.of("timestampFormat", SECONDS + "XXX", "timestampNTZFormat", SECONDS);

    /** Text in front of the value: the generator writes structs only. */
    private static final String PREFIX = "{\"value\":";

    private final CharArrayWriter writer = new CharArrayWriter();
    private final JacksonGenerator generator;

    JsonEncoder(DataType type) {
        generator =
                new JacksonGenerator(
                        new StructType().add("value", type),
                        writer,
                        new JSONOptions(
                                scala.collection.immutable.Map.from(
                                        CollectionConverters.asScala(OPTIONS)),
                                "UTC",
                                ""));
    }

    /**
     * Checks a type.
     *
     * @throws IllegalArgumentException if its values cannot be encoded
     */
    static void checkType(DataType type) {
        if (type instanceof StructType struct) {
            for (StructField field : struct.fields()) {
                checkType(field.dataType());
            }
        } else if (type instanceof ArrayType array) {
            checkType(array.elementType());
        } else if (type instanceof MapType map && map.keyType() instanceof StringType) {
            checkType(map.valueType());
        } else if (!(type instanceof NumericType
                || type instanceof BooleanType
                || type instanceof StringType
                || type instanceof BinaryType
                || type instanceof DateType
                || type instanceof TimestampType
                || type instanceof TimestampNTZType)) {
            throw new IllegalArgumentException(
                    "the option valueFormat is 'json', which cannot encode " + type.simpleString()
                            + "; cast it to string");
        }
    }

    /** Returns the JSON text of a value, which is not null. */
    byte[] encode(Object value) {
        generator.write(new GenericInternalRow(new Object[] {value}));
        generator.flush();
        String text = writer.toString();
        writer.reset();
        return text.substring(PREFIX.length(), text.length() - 1).getBytes(StandardCharsets.UTF_8);
    }
}
