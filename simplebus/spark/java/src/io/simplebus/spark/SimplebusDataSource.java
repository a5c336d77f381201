package io.simplebus.spark;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.sources.DataSourceRegister;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

/**
 * Entry point of {@code format("simplebus")}.
 *
 * <p>Spark prefers a data source in a jar to one in Python with the same name. A query with options
 * that only the Python source has is passed on to it, and so are unknown options, which it reports.
 */
public final class SimplebusDataSource implements TableProvider, DataSourceRegister {
    static final String NAME = "simplebus";

    private PythonSource python;

    /** Creates the data source. Spark calls it by reflection. */
    public SimplebusDataSource() {}

    @Override
    public String shortName() {
        return NAME;
    }

    @Override
    public StructType inferSchema(CaseInsensitiveStringMap options) {
        return isServedByPython(options)
                ? python(options).inferSchema(options)
                : ColumnNames.schema(options);
    }

    /** Returns true: a writer gets the columns of the frame, and the Python source any schema. */
    @Override
    public boolean supportsExternalMetadata() {
        return true;
    }

    @Override
    public Table getTable(
            StructType schema, Transform[] partitioning, Map<String, String> properties) {
        return isServedByPython(properties)
                ? python(properties).table(schema, properties)
                : new MessageTable(ColumnNames.schema(properties));
    }

    private static boolean isServedByPython(Map<String, String> options) {
        return !SourceOptions.unknownNames(options).isEmpty();
    }

    private PythonSource python(Map<String, String> options) {
        if (python == null) { // Each one starts a Python process.
            python = new PythonSource("the options " + SourceOptions.unknownNames(options));
        }
        return python;
    }
}
