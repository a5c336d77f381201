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
 * <p>Spark prefers a data source in a jar to one in Python with the same name. A query that reads the
 * files of a journal is passed on to the Python source.
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
        return SourceOptions.readsJournal(options)
                ? python().inferSchema(options)
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
        return SourceOptions.readsJournal(properties)
                ? python().table(schema, properties)
                : new MessageTable(ColumnNames.schema(properties), schema);
    }

    private PythonSource python() {
        if (python == null) { // Each one starts a Python process.
            python = new PythonSource("the files of journals");
        }
        return python;
    }
}
