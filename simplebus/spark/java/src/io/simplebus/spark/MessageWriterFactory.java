package io.simplebus.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.DataWriterFactory;
import org.apache.spark.sql.connector.write.streaming.StreamingDataWriterFactory;

/**
 * Factory of the writers of a job or query, in the executors.
 *
 * <p>The publisher of a task is called as in the Python sink, so that either continues the other's
 * batch.
 *
 * @param id option {@code publisher} or random id of the batch job, or id of the streaming query
 */
record MessageWriterFactory(SinkColumns columns, SinkOptions options, String id)
        implements DataWriterFactory, StreamingDataWriterFactory {
    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId) {
        return new MessageWriter(columns, options, "spark " + id + " " + partitionId);
    }

    @Override
    public DataWriter<InternalRow> createWriter(int partitionId, long taskId, long epochId) {
        return new MessageWriter(columns, options, "spark " + id + " " + epochId + " " + partitionId);
    }
}
