package io.simplebus.spark;

import org.apache.spark.sql.connector.write.WriterCommitMessage;

/**
 * Result of one task.
 *
 * @param rows rows of the task
 * @param storedBefore rows that an earlier attempt of the task had published
 */
record TaskWriteResult(long rows, long storedBefore) implements WriterCommitMessage {}
