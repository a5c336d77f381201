package io.simplebus.spark;

import io.simplebus.client.BusAddress;
import org.apache.spark.sql.connector.read.InputPartition;

/**
 * Messages that one task reads. It contains everything its executor needs: it may run on another
 * machine, and twice.
 */
record MessagePartition(MessageRange range, int classId, SourceOptions options, RowFilter filter)
        implements InputPartition {
    private static final long serialVersionUID = 1;

    @Override
    public String[] preferredLocations() {
        // A single bus would pull all tasks to one machine.
        return options.servers().size() > 1
                ? new String[] {BusAddress.parse(range.server()).host()}
                : new String[0];
    }
}
