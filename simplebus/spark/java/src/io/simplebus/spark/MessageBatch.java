package io.simplebus.spark;

import java.io.IOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;

/**
 * One batch job, from startingOffsets to endingOffsets as resolved when it is planned. It is planned
 * once, for its statistics and for its tasks.
 */
final class MessageBatch implements Batch {
    private final SourceOptions options;
    private final StructType schema;
    private final FilterBounds bounds;
    private final long limit;
    private InputPartition[] partitions;

    MessageBatch(SourceOptions options, StructType schema, FilterBounds bounds, long limit) {
        this.options = options;
        this.schema = schema;
        this.bounds = bounds;
        this.limit = limit;
    }

    @Override
    public InputPartition[] planInputPartitions() {
        if (partitions == null) {
            try (BusReaders buses = new BusReaders(options)) {
                partitions = plan(buses);
            } catch (IOException error) {
                throw new UnreachableException(error);
            }
        }
        return partitions.clone();
    }

    private InputPartition[] plan(BusReaders buses) throws IOException {
        for (String server : options.servers()) {
            buses.get(server).checkClasses(options.subscribe());
        }
        OffsetSpec starting = buses.resolveTimes(options.starting());
        OffsetSpec ending = buses.resolveTimes(options.ending());
        Map<String, BusExtent> extents = new LinkedHashMap<>();
        for (String server : options.servers()) {
            extents.put(server, buses.get(server).getExtent(options.subscribe(), false));
        }
        BusReaders.checkDistinct(extents);
        FilterBounds.Span span =
                bounds.narrow(starting.resolve(extents), ending.resolve(extents));
        return partitions(
                ReadPlanner.plan(span.start(), span.end(), extents),
                buses,
                bounds.rowFilter(options.channels(), limit));
    }

    /** Cuts a plan into partitions. Lost ranges are an error, or are logged. */
    static InputPartition[] partitions(
            ReadPlanner.ReadPlan plan, BusReaders buses, RowFilter filter) throws IOException {
        SourceOptions options = buses.options();
        Losses.report(plan.losses(), options.failOnDataLoss());
        List<InputPartition> found = new ArrayList<>();
        for (MessageRange range :
                ReadPlanner.split(
                        plan.ranges(), options.maxPartitionMessages(), options.minPartitions())) {
            int id = buses.get(range.server()).classId(range.className());
            found.add(new MessagePartition(range, id, options, filter));
        }
        return found.toArray(new InputPartition[0]);
    }

    /** Returns the number of messages in the planned ranges. */
    long countMessages() {
        long count = 0;
        for (InputPartition one : planInputPartitions()) {
            count += Math.min(limit, ((MessagePartition) one).range().count());
        }
        return count;
    }

    @Override
    public PartitionReaderFactory createReaderFactory() {
        return new MessageReaderFactory(schema, null);
    }
}
