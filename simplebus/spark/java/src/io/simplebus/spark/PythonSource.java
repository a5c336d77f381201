package io.simplebus.spark;

import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The data source in Python, which serves the queries that this connector does not support. */
final class PythonSource {
    private static final Logger LOG = LoggerFactory.getLogger("simplebus.spark");
    private static final AtomicBoolean IS_LOGGED = new AtomicBoolean();

    /** Option that marks a query which the connector has passed to the Python source. */
    private static final String CONNECTOR_OPTION = "simplebus.connector";

    private final PythonDataSourceV2 source = new PythonDataSourceV2();

    /** @param reason what the Python source serves, for the log */
    PythonSource(String reason) {
        source.setShortName(SimplebusDataSource.NAME);
        if (IS_LOGGED.compareAndSet(false, true)) {
            LOG.info("the source in Python serves {}", reason);
        }
    }

    private static Map<String, String> withConnector(Map<String, String> options) {
        Map<String, String> found = new HashMap<>(options);
        found.put(CONNECTOR_OPTION, "true");
        return found;
    }

    StructType inferSchema(Map<String, String> options) {
        return source.inferSchema(new CaseInsensitiveStringMap(withConnector(options)));
    }

    Table table(StructType schema, Map<String, String> options) {
        return source.getTable(schema, new Transform[0], withConnector(options));
    }
}
