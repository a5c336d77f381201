package io.simplebus.spark;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Columns of the source. They are named as in Spark's Kafka source, plus channel and server. */
final class ColumnNames {
    static final String KEY = "key";
    static final String VALUE = "value";
    static final String TOPIC = "topic";
    static final String PARTITION = "partition";
    static final String OFFSET = "offset";
    static final String TIMESTAMP = "timestamp";
    static final String TIMESTAMP_TYPE = "timestampType";
    static final String CHANNEL = "channel";
    static final String SERVER = "server";
    static final String HEADERS = "headers";
    static final String MEMORY = "memory";

    private ColumnNames() {}

    /** Returns the schema of the source with these options. */
    static StructType schema(Map<String, String> options) {
        List<StructField> fields = new ArrayList<>();
        fields.add(DataTypes.createStructField(KEY, DataTypes.BinaryType, true));
        fields.add(DataTypes.createStructField(VALUE, DataTypes.BinaryType, false));
        fields.add(DataTypes.createStructField(TOPIC, DataTypes.StringType, false));
        fields.add(DataTypes.createStructField(PARTITION, DataTypes.IntegerType, false));
        fields.add(DataTypes.createStructField(OFFSET, DataTypes.LongType, false));
        fields.add(DataTypes.createStructField(TIMESTAMP, DataTypes.TimestampType, false));
        fields.add(DataTypes.createStructField(TIMESTAMP_TYPE, DataTypes.IntegerType, false));
        fields.add(DataTypes.createStructField(CHANNEL, DataTypes.StringType, true));
        fields.add(DataTypes.createStructField(SERVER, DataTypes.StringType, false));
        if (SourceOptions.isTrue(options, "includeHeaders")) {
            StructType header =
                    DataTypes.createStructType(
                            List.of(
                                    DataTypes.createStructField("key", DataTypes.StringType, true),
                                    DataTypes.createStructField("value", DataTypes.BinaryType, true)));
            fields.add(
                    DataTypes.createStructField(
                            HEADERS, DataTypes.createArrayType(header, true), true));
        }
        if (SourceOptions.isTrue(options, "includeMemory")) {
            fields.add(DataTypes.createStructField(MEMORY, DataTypes.StringType, false));
        }
        return DataTypes.createStructType(fields);
    }
}
