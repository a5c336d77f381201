/**
 * Spark connector of simplebus: {@code format("simplebus")} in the JVM.
 *
 * <p>It has the options, columns, offsets and errors of the Python data source in
 * {@code simplebus.spark}, so that a query may switch between the two. In reading order:
 *
 * <ul>
 *   <li>{@link io.simplebus.spark.SimplebusDataSource}: entry point; passes to the Python source the
 *       queries that this connector does not support
 *   <li>{@code SourceOptions}, {@code Offsets}, {@code OffsetSpec}: options and offsets, without I/O
 *   <li>{@code ReadPlanner}: ranges to read, from offsets and stored messages, without I/O
 *   <li>{@code BusReader}, {@code BusReaders}: requests to the buses, repeated after a lost connection
 *   <li>{@code MessageTable}, {@code MessageScanBuilder}, {@code MessageScan}, {@code MessageBatch},
 *       {@code MessageStream}: what Spark plans with, in the driver
 *   <li>{@code MessagePartition}, {@code MessagePartitionReader}, {@code MessageBlock},
 *       {@code MessageColumns}: reading of messages as columns, in the executors
 *   <li>{@code SinkOptions}, {@code SinkColumns}, {@code RowMetadata}: rows as messages, without I/O
 *   <li>{@code MessageWriteBuilder}, {@code MessageWrite}, {@code MessageWriter}: batch and streaming
 *       writer; each task is a publisher of its own
 *   <li>{@code QueryRetention}: durables that retain unprocessed messages on the buses
 * </ul>
 */
package io.simplebus.spark;
