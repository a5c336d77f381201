package io.simplebus.spark;

import org.apache.spark.sql.connector.write.LogicalWriteInfo;
import org.apache.spark.sql.connector.write.SupportsTruncate;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriteBuilder;
import org.apache.spark.sql.internal.connector.SupportsStreamingUpdateAsAppend;

/** Builder of a write, for the modes append and update. */
final class MessageWriteBuilder implements SupportsTruncate, SupportsStreamingUpdateAsAppend {
    private final LogicalWriteInfo info;

    MessageWriteBuilder(LogicalWriteInfo info) {
        this.info = info;
    }

    @Override
    public WriteBuilder truncate() {
        throw new IllegalArgumentException(
                "a bus cannot be overwritten, messages are added: expected mode append, or update for "
                        + "a stream");
    }

    @Override
    public Write build() {
        SinkOptions options = SinkOptions.parse(info.options());
        SinkColumns columns =
                SinkColumns.find(
                        info.schema(), !options.className().isEmpty(), options.isJson());
        return new MessageWrite(columns, options, info.queryId());
    }
}
