package io.simplebus.client;

import com.fasterxml.jackson.databind.JsonNode;
import java.io.Closeable;
import java.io.IOException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Deque;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;

/**
 * Named publisher that numbers its messages from 0, so that each is stored once.
 *
 * <p>A later publisher with the same name and the same messages replaces this one: it skips the
 * messages that the bus has, and this one fails. A lost connection is replaced, and unconfirmed
 * messages are sent again under their numbers. One thread uses a publisher.
 *
 * <p>Unconfirmed messages stay in memory, at most as many bytes as the bus grants as credit, or 8 MiB.
 */
public final class BusPublisher implements Closeable {
    static final int NUMBER_MASK = Integer.MAX_VALUE;

    static final int HALF_NUMBER_RANGE = 1 << 30;
    private static final int BLOCK_BYTES = 1 << 18;

    /** Bytes at the end of a block's buffer, for its last frame. */
    private static final int MARGIN_BYTES = 1 << 14;

    private static final long CREDIT_BYTES_MAX = 8 << 20;
    private static final int FREE_BUFFERS_MAX = 16;
    private static final int NAMED_CLASSES_MAX = 1000;
    private static final double RECONNECT_DELAY_SECONDS = 0.05;

    /** A connection that lasted this long restarts the time for which connecting is retried. */
    private static final double STABLE_SECONDS = 5;

    private final BusAddress address;
    private final Credentials credentials;
    private final String name;
    private final double timeoutSeconds;
    private final String memoryId;
    private final Map<String, Integer> classIds = new HashMap<>();
    private final Set<Integer> namedIds = new HashSet<>();
    private final Deque<PublishBlock> blocks = new ArrayDeque<>();
    private final Deque<InFlight> inFlight = new ArrayDeque<>();
    private final Deque<byte[]> freeBuffers = new ArrayDeque<>();
    private final ScheduledExecutorService heartbeats =
            Executors.newSingleThreadScheduledExecutor(BusPublisher::newDaemon);

    private volatile BusConnection connection;
    private PublishReceiver receiver;
    private PublishBlock openBlock;
    private long inFlightBytes;
    private long creditBytes;
    private int frameBytesMax;
    private final long storedBefore;

    /** Number of messages that were published or skipped. */
    private long position;

    /** All messages before this position are stored, or were refused. */
    private long confirmedPosition;

    /** Time of the last connection, in nanoseconds. */
    private long connectedAt;

    /** Time of the last Confirm, or loss of a stable connection, in nanoseconds. */
    private long aliveAt;

    private ServerFrame refusal;

    /** Frames that were sent together and are not confirmed. */
    private record InFlight(long end, int bytes) {}

    /**
     * Connects; tries for the timeout.
     *
     * @param name name of the publisher; the memory id of the bus is appended, since numbers begin at 0
     *     again in a bus that lost its data
     * @param timeoutSeconds time for which connecting is retried
     */
    public BusPublisher(
            BusAddress address, Credentials credentials, String name, double timeoutSeconds)
            throws IOException {
        this.address = address;
        this.credentials = credentials;
        this.timeoutSeconds = timeoutSeconds;
        try (BusConnection first =
                ConnectionRetry.connect(address, credentials, null, timeoutSeconds)) {
            this.memoryId = first.memoryId();
        }
        this.name = name + " " + memoryId;
        connect(-1);
        this.confirmedPosition = receiver.nextNumber();
        this.storedBefore = confirmedPosition;
        this.aliveAt = connectedAt;
        double heartbeat = connection.connectReply().path("heartbeat").asDouble();
        if (heartbeat > 0) {
            long interval = Math.max(1, (long) (heartbeat * 1000 / 3));
            heartbeats.scheduleWithFixedDelay(
                    this::sendHeartbeat, interval, interval, TimeUnit.MILLISECONDS);
        }
    }

    private static Thread newDaemon(Runnable work) {
        Thread thread = new Thread(work, "simplebus heartbeat");
        thread.setDaemon(true);
        return thread;
    }

    private void sendHeartbeat() {
        try {
            connection.sendHeartbeat();
        } catch (IOException error) {
            // The thread that uses the publisher sees the loss and connects again.
        }
    }

    /** Returns the number of messages that the bus had before this publisher connected. */
    public long storedBefore() {
        return storedBefore;
    }

    /** Returns the number of messages that were published or skipped. */
    public long position() {
        return position;
    }

    // Publishing ----------------------------------------------------------------------------------

    /**
     * Returns the id of a class, which is created if it does not exist.
     *
     * @throws RefusedException if the bus refuses the class
     */
    public int classId(String className) throws IOException {
        Integer known = classIds.get(className);
        if (known == null) {
            known = requestNames(className).path(className).asInt();
            classIds.put(className, known);
        }
        return known;
    }

    /**
     * Names a class by its id, so that it exists. Call it before the first message of the class.
     *
     * @throws RefusedException if the bus refuses the class
     */
    public void nameClass(int classId) throws IOException {
        if (!namedIds.contains(classId)) {
            requestNames(classId);
            namedIds.add(classId);
        }
    }

    private JsonNode requestNames(Object idOrName) throws IOException {
        while (true) {
            try {
                int request = connection.sendNames(List.of(idOrName));
                return receiver.awaitReply(request).path("classes");
            } catch (BusConnectionException error) {
                recover(error);
            }
        }
    }

    /** Returns true if the bus has the next message already, so that it must be skipped. */
    public boolean isNextStored() {
        return position < confirmedPosition;
    }

    /** Skips the next message, which the bus has. */
    public void skip() {
        position++;
    }

    /**
     * Publishes a message. It is sent when enough others have followed, or by {@link #flush}.
     *
     * @param classId a class that was named
     * @param prefix see {@link EnvelopePrefix}; null for none
     * @throws IllegalArgumentException if the message is too long
     */
    public void publish(int classId, byte[] prefix, byte[] payload) throws IOException {
        if (isNextStored()) {
            skip();
            return;
        }
        if (openBlock == null) {
            byte[] buffer = freeBuffers.poll();
            openBlock =
                    new PublishBlock(
                            buffer == null ? new byte[BLOCK_BYTES + MARGIN_BYTES] : buffer, position);
            blocks.add(openBlock);
        }
        openBlock.append(classId, prefix, payload, frameBytesMax);
        position++;
        if (openBlock.size() >= BLOCK_BYTES) {
            send();
        }
    }

    /**
     * Sends all messages and waits until the bus has confirmed them.
     *
     * @throws IOException if the bus refused messages
     */
    public void flush() throws IOException {
        send();
        while (confirmedPosition < position) {
            try {
                receiver.awaitConfirm(numberOf(confirmedPosition));
                applyConfirms();
            } catch (BusConnectionException error) {
                recover(error);
                send();
            }
        }
        keepRefusal();
        if (refusal != null) {
            throw new IOException(
                    "the bus at " + address.name() + " refused messages, number "
                            + refusal.number() + " and perhaps others: " + refusal.content().path("code").asText() + ": "
                            + refusal.content().path("message").asText());
        }
    }

    /** Sends all messages. Waits for Confirms where the credit is used up. */
    private void send() throws IOException {
        openBlock = null;
        PublishBlock block = firstUnsent();
        while (block != null) {
            try {
                applyConfirms();
                if (!sendPart(block)) {
                    receiver.awaitConfirm(numberOf(confirmedPosition));
                }
            } catch (BusConnectionException error) {
                recover(error);
            }
            block = firstUnsent();
        }
    }

    private PublishBlock firstUnsent() {
        for (PublishBlock block : blocks) {
            if (!block.isSent()) {
                return block;
            }
        }
        return null;
    }

    /** Sends as much of a block as the credit allows. Returns false if that is nothing. */
    private boolean sendPart(PublishBlock block) throws IOException {
        int begin = block.sentBytes();
        int end = block.endWithin(creditBytes - inFlightBytes, inFlight.isEmpty());
        if (end == begin) {
            return false;
        }
        connection.write(block.bytes(), begin, end - begin);
        block.markSentTo(end);
        inFlight.add(new InFlight(block.sentEnd(), end - begin));
        inFlightBytes += end - begin;
        return true;
    }

    private void applyConfirms() {
        int advance = receiver.nextNumber() - numberOf(confirmedPosition) & NUMBER_MASK;
        if (advance > 0) {
            aliveAt = System.nanoTime();
            confirm(confirmedPosition + advance);
        }
    }

    private void confirm(long end) {
        confirmedPosition = end;
        while (!inFlight.isEmpty() && inFlight.peek().end() <= end) {
            inFlightBytes -= inFlight.poll().bytes();
        }
        while (!blocks.isEmpty() && blocks.peek().end() <= end) {
            PublishBlock block = blocks.poll();
            if (block == openBlock) {
                openBlock = null;
            }
            if (freeBuffers.size() < FREE_BUFFERS_MAX
                    && block.bytes().length == BLOCK_BYTES + MARGIN_BYTES) {
                freeBuffers.push(block.bytes());
            }
        }
    }

    private static int numberOf(long position) {
        return (int) position & NUMBER_MASK;
    }

    // Connections ---------------------------------------------------------------------------------

    /** @param unconfirmed lowest unconfirmed message number; -1 for the first connection */
    private void connect(int unconfirmed) throws IOException {
        Publisher publisher = new Publisher(name, name, unconfirmed, memoryId);
        connection = ConnectionRetry.connect(address, credentials, publisher, timeoutSeconds);
        JsonNode reply = connection.connectReply();
        String loss = "";
        if (!connection.memoryId().equals(memoryId)) {
            loss =
                    "was reset, has the memory id " + connection.memoryId()
                            + " now, and lost the messages that this task had published";
        } else if (reply.path("lost").asLong() > 0) {
            loss = "lost " + reply.path("lost").asLong() + " messages that it had confirmed";
        }
        if (!loss.isEmpty()) {
            connection.close();
            throw resetError(loss);
        }
        creditBytes = Math.min(reply.path("credit").asLong(), CREDIT_BYTES_MAX);
        frameBytesMax = reply.path("frame_bytes").asInt();
        receiver = new PublishReceiver(connection, reply.path("next").asInt());
        receiver.start();
        connectedAt = System.nanoTime();
    }

    private BusResetException resetError(String loss) {
        return new BusResetException(
                "the bus at " + address.name() + " " + loss + "; Spark retries the task");
    }

    /** Replaces a lost connection; tries for the timeout. */
    private void recover(BusConnectionException error) throws IOException {
        BusConnectionException reason = receiver.reasonOf(error);
        applyConfirms();
        keepRefusal();
        if (System.nanoTime() - connectedAt > STABLE_SECONDS * 1e9) {
            aliveAt = System.nanoTime();
        }
        while (true) {
            connection.abort();
            if (reason.isPermanent() || System.nanoTime() - aliveAt > timeoutSeconds * 1e9) {
                throw reason;
            }
            try {
                ConnectionRetry.sleep(RECONNECT_DELAY_SECONDS);
                connect(numberOf(confirmedPosition));
                resume();
                nameClassesAgain();
                return;
            } catch (BusConnectionException again) {
                reason = again;
            }
        }
    }

    private void keepRefusal() {
        if (refusal == null) {
            refusal = receiver.refusal();
        }
    }

    /** Prepares the messages that the bus does not have to be sent again. */
    private void resume() throws BusResetException {
        int advance = receiver.nextNumber() - numberOf(confirmedPosition) & NUMBER_MASK;
        if (advance >= HALF_NUMBER_RANGE) {
            throw resetError("lost messages that it had confirmed");
        }
        inFlight.clear();
        inFlightBytes = 0;
        confirm(confirmedPosition + advance);
        blocks.forEach(block -> block.rewind(confirmedPosition));
    }

    /** Names all classes with their ids: a bus with other ids refuses them. */
    private void nameClassesAgain() throws IOException {
        List<Object> classes = new ArrayList<>();
        classIds.forEach(
                (className, id) -> classes.add(Json.object().put("id", id).put("name", className)));
        classes.addAll(namedIds);
        while (!classes.isEmpty()) {
            List<Object> some = classes.subList(0, Math.min(classes.size(), NAMED_CLASSES_MAX));
            receiver.awaitReply(connection.sendNames(Collections.unmodifiableList(some)));
            some.clear();
        }
    }

    /** Closes the connection. Messages that were not flushed may be stored or not. */
    @Override
    public void close() {
        heartbeats.shutdownNow();
        connection.close();
    }
}
