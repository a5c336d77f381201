package io.simplebus.spark;

import java.util.OptionalLong;
import org.apache.spark.sql.connector.metric.CustomMetric;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Scan of messages, as a batch or as a stream. */
final class MessageScan implements Scan, SupportsReportStatistics {
    private final CaseInsensitiveStringMap options;
    private final StructType schema;
    private final FilterBounds bounds;
    private final long limit;
    private MessageBatch batch;
    private boolean isStream;

    MessageScan(
            CaseInsensitiveStringMap options, StructType schema, FilterBounds bounds, long limit) {
        this.options = options;
        this.schema = schema;
        this.bounds = bounds;
        this.limit = limit;
    }

    @Override
    public StructType readSchema() {
        return schema;
    }

    @Override
    public String description() {
        return "simplebus " + options.getOrDefault("subscribe", options.getOrDefault("subscribePattern", "")) + " at "
                + options.getOrDefault("servers", options.getOrDefault("path", ""));
    }

    @Override
    public ColumnarSupportMode columnarSupportMode() {
        return ColumnarSupportMode.SUPPORTED;
    }

    @Override
    public Batch toBatch() {
        if (batch == null) {
            batch =
                    new MessageBatch(
                            BusReaders.resolvePattern(SourceOptions.parse(options, false)),
                            schema,
                            bounds,
                            limit);
        }
        return batch;
    }

    @Override
    public MicroBatchStream toMicroBatchStream(String checkpointLocation) {
        isStream = true;
        return new MessageStream(
                BusReaders.resolvePattern(SourceOptions.parse(options, true)), schema);
    }

    @Override
    public Statistics estimateStatistics() {
        OptionalLong count =
                isStream
                        ? OptionalLong.empty()
                        : OptionalLong.of(((MessageBatch) toBatch()).countMessages());
        OptionalLong bytes =
                count.isEmpty()
                        ? OptionalLong.empty()
                        : OptionalLong.of(count.getAsLong() * schema.defaultSize());
        return new Statistics() {
            @Override
            public OptionalLong sizeInBytes() {
                return bytes;
            }

            @Override
            public OptionalLong numRows() {
                return count;
            }
        };
    }

    @Override
    public CustomMetric[] supportedCustomMetrics() {
        return new CustomMetric[] {new FetchedBytesMetric()};
    }
}
