package io.simplebus.spark;

import java.util.EnumSet;
import java.util.Set;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.SupportsWrite;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Classes of buses as a table. */
final class MessageTable implements SupportsRead, SupportsWrite {
    private final StructType schema;
    private final StructType givenSchema;

    /**
     * @param schema columns of the source
     * @param givenSchema columns of the frame that is written, or the schema of the user who reads
     */
    MessageTable(StructType schema, StructType givenSchema) {
        this.schema = schema;
        this.givenSchema = givenSchema;
    }

    @Override
    public String name() {
        return SimplebusDataSource.NAME;
    }

    // The interface replaced this method by columns(), which calls it.
    @Override
    @SuppressWarnings("deprecation")
    public StructType schema() {
        return schema;
    }

    @Override
    public Set<TableCapability> capabilities() {
        return EnumSet.of(
                TableCapability.BATCH_READ,
                TableCapability.MICRO_BATCH_READ,
                TableCapability.BATCH_WRITE,
                TableCapability.STREAMING_WRITE,
                TableCapability.TRUNCATE,
                TableCapability.ACCEPT_ANY_SCHEMA);
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
        if (!givenSchema.catalogString().equals(schema.catalogString())) {
            throw new IllegalArgumentException(
                    "a schema is set, but the columns are fixed; parse the values by "
                            + "simplebus.spark.parse_json, or by from_json");
        }
        return new MessageScanBuilder(options, schema);
    }

    @Override
    public WriteBuilder newWriteBuilder(LogicalWriteInfo info) {
        return new MessageWriteBuilder(info);
    }
}
