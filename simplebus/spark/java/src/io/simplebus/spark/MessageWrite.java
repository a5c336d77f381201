package io.simplebus.spark;

import io.simplebus.client.RefusedException;
import java.io.IOException;
import java.util.UUID;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.SparkSession;
import org.apache.spark.sql.connector.write.BatchWrite;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.PhysicalWriteInfo;
import org.apache.spark.sql.connector.write.Write;
import org.apache.spark.sql.connector.write.WriterCommitMessage;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingWrite;

/**
 * Writing of rows, as a batch job or as a stream.
 *
 * <p>Nothing is left to do when a batch is committed: its tasks end when the bus has confirmed every
 * message. Messages of an aborted batch stay, and the next attempt continues after them.
 */
final class MessageWrite implements Write, BatchWrite, StreamingWrite {
    /** Spark's property of a query with a continuous trigger. */
    private static final String CONTINUOUS_PROPERTY = "__is_continuous_processing";

    /** Spark's property with the number of a batch of a stream. */
    private static final String BATCH_PROPERTY = "streaming.sql.batchId";

    private final SinkColumns columns;
    private final SinkOptions options;
    private final String queryId;

    /** @param queryId id of the streaming query; unused by a batch job */
    MessageWrite(SinkColumns columns, SinkOptions options, String queryId) {
        this.columns = columns;
        this.options = options;
        this.queryId = queryId;
    }

    @Override
    public String description() {
        return "simplebus at " + options.server();
    }

    @Override
    public BatchWrite toBatch() {
        return this;
    }

    @Override
    public StreamingWrite toStreaming() {
        options.checkStream();
        return this;
    }

    @Override
    public DataWriterFactory createBatchWriterFactory(PhysicalWriteInfo info) {
        checkBus(false);
        String job =
                options.publisher().isEmpty()
                        ? UUID.randomUUID().toString().replace("-", "")
                        : options.publisher();
        return new MessageWriterFactory(columns, options, job);
    }

    @Override
    public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
        SparkContext context = SparkSession.active().sparkContext();
        if ("true".equals(context.getLocalProperty(CONTINUOUS_PROPERTY))) {
            throw new IllegalArgumentException(
                    "the sink got a trigger with continuous, which may repeat other rows after a failure; "
                            + "expected processingTime or availableNow");
        }
        checkBus(!"0".equals(context.getLocalProperty(BATCH_PROPERTY)));
        return new MessageWriterFactory(columns, options, queryId);
    }

    /**
     * Connects to the bus and names the class, so that a wrong option is an error of one sentence
     * instead of a failed task.
     *
     * @param retriesConnect false if a user waits for the start
     */
    private void checkBus(boolean retriesConnect) {
        try (BusReader bus =
                new BusReader(options.server(), options.timeoutSeconds(), retriesConnect)) {
            if (!options.className().isEmpty()) {
                bus.createClass(options.className());
            }
        } catch (RefusedException error) {
            throw new IllegalArgumentException(
                    "cannot write to " + options.server() + ": " + error.getMessage()
                            + "; check the option class and the permissions of the user",
                    error);
        } catch (IOException error) {
            throw new UnreachableException(error);
        }
    }

    @Override
    public boolean useCommitCoordinator() {
        return true;
    }

    @Override
    public void commit(WriterCommitMessage[] messages) {}

    @Override
    public void abort(WriterCommitMessage[] messages) {}

    @Override
    public void commit(long epochId, WriterCommitMessage[] messages) {}

    @Override
    public void abort(long epochId, WriterCommitMessage[] messages) {}
}
