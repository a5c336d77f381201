package io.simplebus.spark;

import org.apache.spark.sql.connector.metric.CustomSumMetric;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;

/** Metric of a scan: bytes received from the buses. */
public final class FetchedBytesMetric extends CustomSumMetric {
    static final String NAME = "fetchedBytes";

    /** Creates the metric. Spark calls it by reflection. */
    public FetchedBytesMetric() {}

    @Override
    public String name() {
        return NAME;
    }

    @Override
    public String description() {
        return "bytes fetched from the buses";
    }

    static CustomTaskMetric taskMetric(long bytes) {
        return new CustomTaskMetric() {
            @Override
            public String name() {
                return NAME;
            }

            @Override
            public long value() {
                return bytes;
            }
        };
    }
}
