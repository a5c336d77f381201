package io.simplebus.client;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.ByteArrayInputStream;
import java.io.Closeable;
import java.io.EOFException;
import java.io.IOException;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.net.UnknownHostException;
import java.nio.charset.StandardCharsets;
import java.security.cert.CertificateException;
import java.time.Duration;
import java.util.Collection;
import java.util.Set;
import javax.net.ssl.SSLException;
import javax.net.ssl.SSLParameters;
import javax.net.ssl.SSLSocket;

/**
 * One connection to a bus: requests with their replies, and received messages.
 *
 * <p>Every method except {@link #close} may wait for the bus.
 */
public final class BusConnection implements Closeable {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final int REQUEST_NUMBER_MAX = Integer.MAX_VALUE;
    private static final int SILENT_HEARTBEATS_MAX = 3;

    /** Reasons that may no longer apply a moment later. */
    private static final Set<String> TEMPORARY_REASONS =
            Set.of(
                    "heartbeat_timeout",
                    "hello_timeout",
                    "frame_timeout",
                    "stalled",
                    "pending_limit",
                    "too_many_connections",
                    "too_many_attempts",
                    "undelivered_at_close");

    private final BusAddress address;
    private final Socket plainSocket;
    private final Socket socket;
    private final ReceiveBuffer received;
    private final OutputStream output;
    private JsonNode connectReply;
    private int nextRequest = 1;

    /** @param socket the plain socket, or TLS on top of it */
    private BusConnection(BusAddress address, Socket plainSocket, Socket socket) throws IOException {
        this.address = address;
        this.plainSocket = plainSocket;
        this.socket = socket;
        this.received = new ReceiveBuffer(socket.getInputStream());
        this.output = socket.getOutputStream();
    }

    /**
     * Connects and authenticates.
     *
     * @param publisher identity of a publisher; null for a client that only reads
     * @param timeout limit for the connection and for the reply to the Connect request
     * @throws BusConnectionException if the bus cannot be reached or refuses the connection
     */
    public static BusConnection connect(
            BusAddress address, Credentials credentials, Publisher publisher, Duration timeout)
            throws BusConnectionException {
        Socket socket = new Socket();
        try {
            int milliseconds = (int) Math.min(Integer.MAX_VALUE, Math.max(1, timeout.toMillis()));
            socket.setTcpNoDelay(true);
            socket.setKeepAlive(true);
            socket.setSoTimeout(milliseconds);
            socket.connect(new InetSocketAddress(address.host(), address.port()), milliseconds);
            Socket used = address.isSecure() ? startTls(socket, address, credentials) : socket;
            BusConnection connection = new BusConnection(address, socket, used);
            connection.open(credentials, publisher, timeout);
            return connection;
        } catch (IOException error) {
            closeQuietly(socket);
            throw connectError(address, error, timeout, socket.isConnected());
        }
    }

    private static Socket startTls(Socket socket, BusAddress address, Credentials credentials)
            throws IOException {
        SSLSocket secured =
                (SSLSocket)
                        credentials
                                .tlsContext()
                                .getSocketFactory()
                                .createSocket(socket, address.host(), address.port(), true);
        SSLParameters parameters = secured.getSSLParameters();
        parameters.setEndpointIdentificationAlgorithm("HTTPS");
        parameters.setProtocols(new String[] {"TLSv1.3", "TLSv1.2"});
        secured.setSSLParameters(parameters);
        secured.startHandshake();
        return secured;
    }

    private void open(Credentials credentials, Publisher publisher, Duration timeout)
            throws IOException {
        ObjectNode request = JSON.createObjectNode().put("version", 2).put("client", "simplebus Spark");
        if (publisher != null) {
            request.put("name", publisher.name()).put("instance", publisher.instance());
            if (publisher.unconfirmed() >= 0) {
                request.put("unconfirmed", publisher.unconfirmed()).put("bus", publisher.memoryId());
            }
        }
        if (credentials.hasAuth()) {
            ObjectNode auth = request.putObject("auth");
            if (credentials.token().isEmpty()) {
                auth.put("user", credentials.user()).put("password", credentials.password());
            } else {
                auth.put("token", credentials.token());
            }
        }
        connectReply = receiveReply(Frames.CONNECT, send(Frames.CONNECT, 0, 0, request));
        double heartbeat = connectReply.path("heartbeat").asDouble();
        socket.setSoTimeout((int) Math.ceil(heartbeat * SILENT_HEARTBEATS_MAX * 1000));
    }

    private static BusConnectionException connectError(
            BusAddress address, IOException error, Duration timeout, boolean isConnected) {
        if (error instanceof BusConnectionException known) {
            return known;
        }
        if (error instanceof SocketTimeoutException) {
            String seconds = Json.format(timeout.toMillis() / 1000.0);
            String sentence =
                    isConnected
                            ? "connected to " + address + ", but no answer to the Connect frame came "
                                    + "within " + seconds + " s; expected a simplebus server there"
                            : "cannot connect to " + address + ": nothing answered within " + seconds
                                    + " s; expected a simplebus server listening there";
            return new BusConnectionException(sentence, false, error);
        }
        if (error instanceof SSLException) {
            boolean isUntrusted = false;
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                isUntrusted |= cause instanceof CertificateException;
            }
            String sentence =
                    isUntrusted
                            ? "its certificate is not trusted (" + error.getMessage() + "); expected "
                                    + "one for this host, signed by an authority that this program trusts"
                            : "the TLS handshake failed (" + error.getMessage() + "); expected a "
                                    + "simplebus server with TLS there; without TLS, the address begins "
                                    + "with simplebus://";
            return new BusConnectionException(
                    "cannot connect to " + address + ": " + sentence, false, error);
        }
        String reason = error.getMessage();
        if (error instanceof UnknownHostException) {
            reason = "it has no address";
        } else if (error instanceof EOFException) {
            reason = "it closed the connection; see its log for the reason";
        }
        return new BusConnectionException(
                "cannot connect to " + address + ": " + reason
                        + "; expected a simplebus server listening there",
                false,
                error);
    }

    /** Returns the identity of the bus's data; a bus that lost its data has a new one. */
    public String memoryId() {
        return connectReply.path("bus").asText();
    }

    /** Returns the reply to the Connect request. */
    public JsonNode connectReply() {
        return connectReply;
    }

    /** Returns the number of bytes received so far. */
    public long receivedBytes() {
        return received.receivedBytes();
    }

    /**
     * Sends a request.
     *
     * @param target class id or subscription number
     * @param subscription number of a new subscription, else 0
     * @return number of the request, for {@link #receiveReply}
     */
    public int send(byte type, int target, int subscription, JsonNode content) throws IOException {
        int number = nextRequest;
        nextRequest = number == REQUEST_NUMBER_MAX ? 1 : number + 1;
        byte[] text = content.isEmpty() ? new byte[0] : JSON.writeValueAsBytes(content);
        byte[] frame = Frames.encode(type, target, number, subscription, text);
        write(frame, 0, frame.length);
        return number;
    }

    /** Sends a Heartbeat. */
    public void sendHeartbeat() throws IOException {
        byte[] frame = Frames.encode(Frames.HEARTBEAT, 0, 0, 0, new byte[0]);
        write(frame, 0, frame.length);
    }

    /** Sends the frames in a part of {@code bytes}. */
    synchronized void write(byte[] bytes, int begin, int length) throws BusConnectionException {
        try {
            output.write(bytes, begin, length);
            output.flush();
        } catch (IOException error) {
            throw lostError(error);
        }
    }

    /** Waits for the reply to a request and discards everything before it. */
    public JsonNode receiveReply(byte type, int number) throws IOException {
        return receiveReply(type, number, (bytes, isEnvelope, begin, end) -> {});
    }

    /**
     * Waits for the reply to a request.
     *
     * @param receiver gets the messages before the reply; those of the previous reply are lost
     * @throws RefusedException if the bus refused the request
     * @throws BusConnectionException if the connection is lost
     */
    public JsonNode receiveReply(byte type, int number, MessageReceiver receiver) throws IOException {
        try {
            received.compact();
            while (true) {
                int begin = received.readFrame();
                byte[] bytes = received.bytes();
                int content = begin + Frames.HEADER_BYTES;
                int end = received.nextFrame() - Frames.DELIMITER_BYTES;
                byte found = bytes[begin];
                if (found == Frames.MESSAGE) {
                    receiver.add(bytes, false, content, end);
                } else if (found == Frames.ENVELOPE) {
                    receiver.add(bytes, true, content, Frames.unstuff(bytes, content, end));
                } else if (found == type && Frames.readInt(bytes, begin + 3) == number) {
                    return parse(bytes, content, end);
                } else if (found == Frames.ERROR) {
                    checkError(bytes, begin, content, end, type, number);
                }
            }
        } catch (BusConnectionException | RefusedException error) {
            throw error;
        } catch (IOException error) {
            if (connectReply == null) {
                throw error; // `connect` describes it.
            }
            throw lostError(error);
        }
    }

    /** Throws an exception if an Error is fatal or answers the request. */
    private void checkError(byte[] bytes, int begin, int content, int end, byte type, int number)
            throws IOException {
        JsonNode error = parse(bytes, content, end);
        checkFatal(error);
        if (Frames.readShort(bytes, begin + 7) == type
                && Frames.readInt(bytes, begin + 3) == number) {
            throw new RefusedException(error.path("code").asText(), error.path("message").asText());
        }
    }

    private void checkFatal(JsonNode error) throws BusConnectionException {
        if (error.path("fatal").asBoolean()) {
            String code = error.path("code").asText();
            String place = connectReply == null ? "cannot connect to " : "lost the connection to ";
            throw new BusConnectionException(
                    place + address + ": " + code + ": " + error.path("message").asText(),
                    !TEMPORARY_REASONS.contains(code) && !code.equals("draining"),
                    null);
        }
    }

    /**
     * Waits for the next frame. A connection that publishes receives by this method only.
     *
     * @throws BusConnectionException if the connection is lost
     */
    ServerFrame receive() throws BusConnectionException {
        try {
            received.compact();
            int begin = received.readFrame();
            byte[] bytes = received.bytes();
            JsonNode content =
                    parse(
                            bytes,
                            begin + Frames.HEADER_BYTES,
                            received.nextFrame() - Frames.DELIMITER_BYTES);
            if (bytes[begin] == Frames.ERROR) {
                checkFatal(content);
            }
            return new ServerFrame(
                    bytes[begin],
                    Frames.readInt(bytes, begin + 3),
                    Frames.readShort(bytes, begin + 7),
                    content);
        } catch (BusConnectionException error) {
            throw error;
        } catch (IOException error) {
            throw lostError(error);
        }
    }

    private static JsonNode parse(byte[] bytes, int content, int end) throws IOException {
        if (content == end) {
            return JSON.createObjectNode();
        }
        return JSON.readTree(new ByteArrayInputStream(bytes, content, end - content));
    }

    private BusConnectionException lostError(IOException error) {
        String sentence =
                error instanceof EOFException
                        ? "the server at " + address + " closed the connection; see its log for the reason"
                        : "the connection to " + address + " is lost: " + error.getMessage();
        return new BusConnectionException(sentence, false, error);
    }

    /** Names classes, so that they exist. Returns the id of each class that is given by its name. */
    public JsonNode nameClasses(Collection<?> idsOrNames) throws IOException {
        return receiveReply(Frames.CONNECT, sendNames(idsOrNames)).path("classes");
    }

    /** Sends a request that names classes: ids, names or JSON objects. Returns its number. */
    int sendNames(Collection<?> classes) throws IOException {
        ObjectNode request = JSON.createObjectNode();
        classes.forEach(one -> request.withArray("classes").addPOJO(one));
        return send(Frames.CONNECT, 0, 0, request);
    }

    @Override
    public void close() {
        closeQuietly(socket);
    }

    /** Closes the connection without a TLS alert, for which another thread's write may have to end. */
    void abort() {
        closeQuietly(plainSocket);
    }

    private static void closeQuietly(Socket socket) {
        try {
            socket.close();
        } catch (IOException error) {
            // Nothing is left to do for a connection that cannot be closed in order.
        }
    }
}
