package io.simplebus.spark;

import io.simplebus.client.BusAddress;
import io.simplebus.client.BusPublisher;
import io.simplebus.client.Credentials;
import java.io.IOException;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.connector.write.DataWriter;
import org.apache.spark.sql.connector.write.WriterCommitMessage;

/**
 * Writer of one task: it publishes the rows that the bus does not yet have under its publisher name.
 *
 * <p>Row n is message number n, so the bus discards the rows that an earlier attempt of the task
 * stored. A retried task replaces the connection of a previous attempt that still runs. The module
 * {@code simplebus/spark/sink.py} documents when each row is stored once.
 */
final class MessageWriter implements DataWriter<InternalRow> {
    private final SinkOptions options;
    private final String name;
    private final RowMetadata metadata;
    private BusPublisher bus;
    private String className;
    private int classId;

    /** @param name name of the publisher, without the memory id of the bus */
    MessageWriter(SinkColumns columns, SinkOptions options, String name) {
        this.options = options;
        this.name = name;
        this.metadata = new RowMetadata(columns, options);
    }

    @Override
    public void write(InternalRow row) throws IOException {
        if (bus == null) {
            bus =
                    new BusPublisher(
                            BusAddress.parse(options.server()),
                            Credentials.fromEnvironment(System.getenv()),
                            name,
                            options.timeoutSeconds());
        }
        if (bus.isNextStored()) {
            bus.skip();
            return;
        }
        byte[] payload = metadata.payload(row, bus.position());
        if (metadata.read(row, bus.position()) && !metadata.className().equals(className)) {
            className = metadata.className();
            classId = classId(className);
        }
        try {
            bus.publish(classId, metadata.prefix(), payload);
        } catch (IllegalArgumentException error) {
            throw new RowException("row " + bus.position() + ": " + error.getMessage());
        }
    }

    private int classId(String className) throws IOException {
        if (!className.matches("[0-9]+")) {
            return bus.classId(className);
        }
        int found = Integer.parseInt(SourceOptions.className(className));
        bus.nameClass(found);
        return found;
    }

    /** Waits until the bus has confirmed all rows. */
    @Override
    public WriterCommitMessage commit() throws IOException {
        if (bus == null) {
            return new TaskWriteResult(0, 0);
        }
        bus.flush();
        return new TaskWriteResult(bus.position(), Math.min(bus.storedBefore(), bus.position()));
    }

    /** Does nothing: published messages stay, and the next attempt continues after them. */
    @Override
    public void abort() {}

    @Override
    public void close() {
        if (bus != null) {
            bus.close();
        }
    }
}
