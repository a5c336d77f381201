package io.simplebus.spark;

import java.util.UUID;
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
        String job =
                options.publisher().isEmpty()
                        ? UUID.randomUUID().toString().replace("-", "")
                        : options.publisher();
        return new MessageWriterFactory(columns, options, job);
    }

    @Override
    public StreamingDataWriterFactory createStreamingWriterFactory(PhysicalWriteInfo info) {
        return new MessageWriterFactory(columns, options, queryId);
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
