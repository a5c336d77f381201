package io.simplebus.spark;

import java.util.List;
import java.util.stream.Collectors;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Reports of lost messages: an error, or with {@code failOnDataLoss=false} log lines. */
final class Losses {
    private static final Logger LOG = LoggerFactory.getLogger("simplebus.spark");
    private static final int LOGGED_MAX = 20;

    private Losses() {}

    /**
     * @throws DataLossException if {@code isStrict} and there are losses
     */
    static void report(List<LostRange> losses, boolean isStrict) {
        if (isStrict && !losses.isEmpty()) {
            throw new DataLossException(
                    losses.stream().map(LostRange::toString).collect(Collectors.joining("; "))
                            + ". With the option failOnDataLoss=false a query continues without them");
        }
        losses.stream()
                .limit(LOGGED_MAX)
                .forEach(loss -> LOG.warn("skipped {} messages: {}", loss.count(), loss));
        if (losses.size() > LOGGED_MAX) {
            List<LostRange> others = losses.subList(LOGGED_MAX, losses.size());
            LOG.warn(
                    "skipped {} messages of {} more ranges",
                    others.stream().mapToLong(LostRange::count).sum(),
                    others.size());
        }
    }
}
