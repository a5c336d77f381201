package io.simplebus.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import io.simplebus.client.BusConnectionException;
import io.simplebus.client.Frames;
import io.simplebus.client.Json;
import io.simplebus.client.RefusedException;
import java.io.IOException;
import java.util.List;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.util.LongAccumulator;

/**
 * Reader of the messages of one task, one reply of the bus after the other.
 *
 * <p>The next request is sent before a batch is handed over, so that the bus works on it meanwhile.
 * Reading changes nothing at the bus.
 */
final class MessagePartitionReader implements PartitionReader<ColumnarBatch> {
    private static final int FETCH_MESSAGES_MAX = 65_536;
    private static final int NO_REQUEST = 0;

    private final MessagePartition partition;
    private final MessageRange range;
    private final MessageBlock block;
    private final ColumnarBatch batch;
    private final LongAccumulator fetchedBytes;
    private BusReader bus;
    private long nextSequence;
    private long remainingRows;
    private int request = NO_REQUEST;
    private long receivedBefore;
    private long receivedBytes;

    /** @param fetchedBytes counter of received bytes; null for none */
    MessagePartitionReader(
            MessagePartition partition, StructType schema, LongAccumulator fetchedBytes) {
        this.partition = partition;
        this.range = partition.range();
        this.fetchedBytes = fetchedBytes;
        this.nextSequence = range.first();
        this.remainingRows = partition.filter().limit();
        boolean needsTimes =
                List.of(schema.fieldNames()).contains(ColumnNames.TIMESTAMP)
                        || List.of(schema.fieldNames()).contains(ColumnNames.TIMESTAMP_TYPE);
        this.block = new MessageBlock(partition.filter(), needsTimes);
        this.batch = new ColumnarBatch(MessageColumns.create(schema, partition, block));
    }

    @Override
    public boolean next() throws IOException {
        try {
            while (nextSequence < range.last() && remainingRows > 0) {
                if (bus == null) {
                    bus = new BusReader(range.server(), partition.options().timeoutSeconds(), true);
                }
                receiveBlock();
                if (block.count() > 0) {
                    remainingRows -= block.count();
                    batch.setNumRows(block.count());
                    return true;
                }
            }
        } catch (BusConnectionException error) {
            if (partition.options().failOnDataLoss()) {
                throw new BusConnectionException(
                        range + " could not be read completely: " + error.getMessage(), true, error);
            }
            reportLoss(nextSequence, range.last(), error.getMessage());
            nextSequence = range.last();
        }
        return false;
    }

    /** Receives the next messages of the range, and requests those behind them. */
    private void receiveBlock() throws IOException {
        JsonNode reply = null;
        try {
            if (request == NO_REQUEST) {
                sendRequest();
            }
            block.clear();
            reply = bus.connection().receiveReply(Frames.FETCH, request, block);
        } catch (BusConnectionException error) {
            if (error.isPermanent()) {
                throw error;
            }
            request = NO_REQUEST;
            block.clear();
            countBytes();
            bus.reconnect();
            receivedBefore = 0;
        } catch (RefusedException error) {
            if (bus.memoryId().equals(range.memoryId())) {
                throw bus.classError(error);
            }
        }
        if (!bus.memoryId().equals(range.memoryId())) {
            block.clear();
            reportLoss(
                    nextSequence,
                    range.last(),
                    "the bus was reset and has the memory id " + bus.memoryId() + " now");
            nextSequence = range.last();
            return;
        }
        if (reply == null) {
            return; // The connection was replaced.
        }
        countBytes();
        request = NO_REQUEST;
        completeBlock(reply);
    }

    private void completeBlock(JsonNode reply) throws IOException {
        long first = reply.path("first").asLong();
        long next = reply.path("next").asLong();
        if (first > nextSequence) {
            String reason = "the class holds messages from " + reply.path("floor").asLong() + " on";
            reportLoss(nextSequence, Math.min(first, range.last()), reason);
        }
        if (next <= nextSequence) {
            block.clear();
            String reason = "the next message of the class will be " + reply.path("head").asLong();
            reportLoss(nextSequence, range.last(), reason);
            nextSequence = range.last();
            return;
        }
        nextSequence = next;
        block.complete(reply, range.last(), remainingRows);
        if (nextSequence < range.last() && block.count() < remainingRows) {
            sendRequest();
        }
    }

    private void sendRequest() throws IOException {
        long count = Math.min(range.last() - nextSequence, FETCH_MESSAGES_MAX);
        if (!partition.filter().selectsByChannel() && !partition.filter().selectsByTimestamp()) {
            count = Math.min(count, remainingRows);
        }
        ObjectNode content = Json.object().put("first", nextSequence).put("count", count);
        if (block.needsTimes()) {
            content.put("times", true);
        }
        try {
            request = bus.connection().send(Frames.FETCH, partition.classId(), 0, content);
        } catch (BusConnectionException error) {
            request = NO_REQUEST; // The next `receiveBlock` sends it again and reports the error.
            bus.connection().close();
        }
    }

    private void countBytes() {
        long received = bus.connection().receivedBytes();
        receivedBytes += received - receivedBefore;
        if (fetchedBytes != null) {
            fetchedBytes.add(received - receivedBefore);
        }
        receivedBefore = received;
    }

    private void reportLoss(long first, long last, String reason) {
        Losses.report(
                List.of(new LostRange(range.server(), range.className(), first, last, reason)),
                partition.options().failOnDataLoss());
    }

    @Override
    public ColumnarBatch get() {
        return batch;
    }

    @Override
    public CustomTaskMetric[] currentMetricsValues() {
        return new CustomTaskMetric[] {FetchedBytesMetric.taskMetric(receivedBytes)};
    }

    @Override
    public void close() {
        if (bus != null) {
            bus.close();
        }
    }
}
