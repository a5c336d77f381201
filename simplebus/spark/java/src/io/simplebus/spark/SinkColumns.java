package io.simplebus.spark;

import io.simplebus.client.SimilarNames;
import java.io.Serializable;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/**
 * Columns of the sink in the rows of a frame, by their ordinals; -1 for a missing one.
 *
 * @param classOf column {@code class}, or its alias {@code topic}
 * @param schema schema of the rows
 */
record SinkColumns(
        int value, int classOf, int channel, int key, int headers, int expiry, StructType schema)
        implements Serializable {
    private static final List<String> BYTES = List.of("binary", "string");
    private static final double SIMILARITY_MIN = 0.6;
    private static final Map<String, List<String>> TYPES = new LinkedHashMap<>();

    static {
        TYPES.put("value", BYTES);
        TYPES.put("class", List.of("string", "int", "bigint", "smallint"));
        TYPES.put("topic", List.of("string"));
        TYPES.put("channel", List.of("string"));
        TYPES.put("key", BYTES);
        TYPES.put(
                "headers",
                List.of(
                        "array<struct<key:string,value:binary>>",
                        "array<struct<key:string,value:string>>",
                        "map<string,string>"));
        TYPES.put("expiry", List.of("double", "float", "int", "bigint"));
    }

    /**
     * Finds the columns.
     *
     * @param hasClass true if the option class names the class of all rows
     * @param isJson true if values are encoded as JSON
     * @throws IllegalArgumentException if rows with this schema cannot be messages
     */
    static SinkColumns find(StructType schema, boolean hasClass, boolean isJson) {
        Map<String, Integer> ordinals = new LinkedHashMap<>();
        for (StructField field : schema.fields()) {
            checkColumn(field.name(), field.dataType(), isJson);
            ordinals.put(field.name(), ordinals.size());
        }
        if (!ordinals.containsKey("value")) {
            throw new IllegalArgumentException(
                    "the column value is missing; there are " + String.join(", ", ordinals.keySet()));
        }
        if (ordinals.containsKey("class") && ordinals.containsKey("topic")) {
            throw new IllegalArgumentException(
                    "class and topic are two names of one column; drop one of them");
        }
        if (!hasClass && !ordinals.containsKey("class") && !ordinals.containsKey("topic")) {
            throw new IllegalArgumentException(
                    "rows have no class; expected a column class or topic, or the option class");
        }
        if (isJson) {
            JsonEncoder.checkType(schema.apply(ordinals.get("value")).dataType());
        }
        return new SinkColumns(
                ordinals.get("value"),
                ordinals.getOrDefault("class", ordinals.getOrDefault("topic", -1)),
                ordinals.getOrDefault("channel", -1),
                ordinals.getOrDefault("key", -1),
                ordinals.getOrDefault("headers", -1),
                ordinals.getOrDefault("expiry", -1),
                schema);
    }

    private static void checkColumn(String name, DataType type, boolean isJson) {
        List<String> expected = TYPES.get(name);
        if (expected == null) {
            List<String> similar = SimilarNames.find(name, TYPES.keySet(), 1, SIMILARITY_MIN);
            throw new IllegalArgumentException(
                    "unknown column " + name + "; "
                            + (similar.isEmpty()
                                    ? "expected " + String.join(", ", TYPES.keySet())
                                    : "did you mean " + similar.get(0) + "?"));
        }
        if (!expected.contains(type.catalogString()) && !(isJson && name.equals("value"))) {
            throw new IllegalArgumentException(
                    "the column " + name + " is " + type.catalogString() + ", expected "
                            + String.join(" or ", expected)
                            + conversionHint(name, type, expected));
        }
    }

    private static String conversionHint(String name, DataType type, List<String> expected) {
        if (!expected.contains("string")) {
            return "";
        }
        boolean isNested = type.catalogString().contains("<");
        return "; convert it by "
                + (isNested ? "to_json(" + name + ")" : "cast(" + name + " as string)")
                + (name.equals("value") ? ", or set the option valueFormat to json" : "");
    }
}
