package io.simplebus.spark;

import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/** Builder of a scan: takes the columns, filters and limit that Spark pushes down. */
final class MessageScanBuilder
        implements SupportsPushDownRequiredColumns, SupportsPushDownV2Filters, SupportsPushDownLimit {
    private final CaseInsensitiveStringMap options;
    private StructType schema;
    private FilterBounds bounds = new FilterBounds(new Predicate[0]);
    private long limit = Long.MAX_VALUE;

    MessageScanBuilder(CaseInsensitiveStringMap options, StructType schema) {
        this.options = options;
        this.schema = schema;
    }

    @Override
    public void pruneColumns(StructType required) {
        schema = required;
    }

    /** Narrows the read to these filters. Returns all of them: Spark applies them again. */
    @Override
    public Predicate[] pushPredicates(Predicate[] predicates) {
        bounds = new FilterBounds(predicates);
        return predicates;
    }

    @Override
    public Predicate[] pushedPredicates() {
        return bounds.used();
    }

    @Override
    public boolean pushLimit(int rows) {
        limit = rows;
        return true;
    }

    /** Each task reads at most the limit; Spark applies it to all tasks together. */
    @Override
    public boolean isPartiallyPushed() {
        return true;
    }

    @Override
    public Scan build() {
        return new MessageScan(options, schema, bounds, limit);
    }
}
