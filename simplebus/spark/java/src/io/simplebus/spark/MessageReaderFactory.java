package io.simplebus.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.util.LongAccumulator;

/**
 * Factory of the readers of tasks.
 *
 * @param schema columns to read
 * @param fetchedBytes counter of received bytes; null for none
 */
record MessageReaderFactory(StructType schema, LongAccumulator fetchedBytes)
        implements PartitionReaderFactory {
    private static final long serialVersionUID = 1;

    @Override
    public boolean supportColumnarReads(InputPartition partition) {
        return true;
    }

    @Override
    public PartitionReader<ColumnarBatch> createColumnarReader(InputPartition partition) {
        return new MessagePartitionReader((MessagePartition) partition, schema, fetchedBytes);
    }

    @Override
    public PartitionReader<InternalRow> createReader(InputPartition partition) {
        throw new UnsupportedOperationException("messages are read as columns");
    }
}
