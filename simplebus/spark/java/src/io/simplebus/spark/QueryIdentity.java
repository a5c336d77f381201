package io.simplebus.spark;

import java.util.Map;

/**
 * Identity of a query, stored in its checkpoint beside the offsets.
 *
 * @param id random id, generated at the query's first start. Spark asks for an initial offset, with an
 *     id, also if the checkpoint has one: an id that differs from the checkpoint's belongs to such an
 *     unused answer
 * @param durable name of the durable that retains the query's unprocessed messages; empty for none
 * @param startOffsets start of the query's first batch; empty until that batch is planned. Spark does
 *     not store the initial offset before the first batch is committed
 */
record QueryIdentity(String id, String durable, Map<String, ServerOffsets> startOffsets) {
    QueryIdentity withDurable(String name) {
        return new QueryIdentity(id, name, startOffsets);
    }

    QueryIdentity withStartOffsets(Map<String, ServerOffsets> offsets) {
        return new QueryIdentity(id, durable, offsets);
    }
}
