using System;
using System.Diagnostics;
using System.IO;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>One connection to a server, from the reply to its Connect to its end.</summary>
    internal sealed class Session : IDisposable
    {
        private readonly Transport _transport;
        private readonly ReceiveBuffer _buffer;
        private TaskCompletionSource<bool>? _writerIdle;
        private long _sentAt;
        private long _receivedAt;
        private volatile Exception? _failure;

        private Session(Transport transport, ReceiveBuffer buffer, ConnectReply reply)
        {
            _transport = transport;
            _buffer = buffer;
            Reply = reply;
            OpenedAt = _sentAt = _receivedAt = Stopwatch.GetTimestamp();
        }

        public ConnectReply Reply { get; }

        public ReceiveBuffer Buffer => _buffer;

        public long OpenedAt { get; }

        /// <summary>True while a task writes. Under the lock of the connection.</summary>
        public bool IsWriting { get; private set; }

        /// <summary>True if the server shuts down and accepts no new messages. Under the lock of the connection.</summary>
        public bool IsDraining { get; set; }

        /// <summary>Connect to an address and wait for the reply to the Connect.</summary>
        /// <param name="address">Address of the server.</param>
        /// <param name="tls">TLS settings.</param>
        /// <param name="connectFrame">Frame of the Connect request.</param>
        /// <param name="timeout">Time for the attempt.</param>
        /// <param name="cancellationToken">Cancels the attempt.</param>
        /// <exception cref="BusConnectionException">The server refused the client, with its code.</exception>
        public static async Task<Session> OpenAsync(
            BusAddress address, TlsOptions tls, ReadOnlyMemory<byte> connectFrame, TimeSpan timeout,
            CancellationToken cancellationToken)
        {
            using CancellationTokenSource limit = CancellationTokenSource.CreateLinkedTokenSource(cancellationToken);
            limit.CancelAfter(timeout);
            Transport? transport = null;
            try
            {
                transport = await Transport.ConnectAsync(address, tls, limit.Token).ConfigureAwait(false);
                using (limit.Token.Register(transport.Dispose))
                {
                    await transport.WriteAsync(connectFrame).ConfigureAwait(false);
                    ReceiveBuffer buffer = new ReceiveBuffer();
                    ConnectReply reply = await ReadReplyAsync(transport, buffer).ConfigureAwait(false);
                    limit.Token.ThrowIfCancellationRequested();
                    return new Session(transport, buffer, reply);
                }
            }
            catch (Exception error) when (!(error is BusException))
            {
                transport?.Dispose();
                cancellationToken.ThrowIfCancellationRequested();
                if (limit.IsCancellationRequested)
                    throw new BusConnectionException(
                        $"no server answers at {address} within {timeout.TotalSeconds:0.#} s", null, error);
                throw new BusConnectionException($"cannot connect to {address}: {error.Message}", null, error);
            }
            catch
            {
                transport?.Dispose();
                throw;
            }
        }

        /// <summary>Read bytes into the buffer.</summary>
        /// <exception cref="IOException">The connection is lost.</exception>
        public async ValueTask ReadAsync()
        {
            await ReadAsync(_transport, _buffer).ConfigureAwait(false);
            Volatile.Write(ref _receivedAt, Stopwatch.GetTimestamp());
        }

        public async ValueTask WriteAsync(ReadOnlyMemory<byte> bytes)
        {
            await _transport.WriteAsync(bytes).ConfigureAwait(false);
            Volatile.Write(ref _sentAt, Stopwatch.GetTimestamp());
        }

        public Task ShutdownAsync() => _transport.ShutdownAsync();

        /// <summary>Note that a task begins to write. Under the lock of the connection.</summary>
        public void BeginWriting() => IsWriting = true;

        /// <summary>Note that the task has ended its write. Under the lock of the connection.</summary>
        public void EndWriting()
        {
            IsWriting = false;
            _writerIdle?.TrySetResult(true);
            _writerIdle = null;
        }

        /// <summary>Return a task that ends when nothing writes. Under the lock of the connection.</summary>
        public Task WhenWriterIdle()
        {
            if (!IsWriting)
                return Task.CompletedTask;
            _writerIdle ??= new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            return _writerIdle.Task;
        }

        /// <summary>Return whether a Heartbeat is due.</summary>
        /// <exception cref="IOException">The server is silent for three heartbeats.</exception>
        public bool CheckHeartbeat()
        {
            double seconds = Reply.HeartbeatSeconds;
            if (SecondsSince(Volatile.Read(ref _receivedAt)) > 3 * seconds)
                throw new IOException($"the server was silent for {3 * seconds:0.#} s");
            return SecondsSince(Volatile.Read(ref _sentAt)) > seconds * 0.75;
        }

        /// <summary>End the connection because of an error. The reader then raises it.</summary>
        public void Fail(Exception error)
        {
            _failure ??= error;
            _transport.Dispose();
        }

        /// <summary>Return the error that ended the connection first.</summary>
        public Exception FirstError(Exception error) => _failure ?? error;

        public void Dispose() => _transport.Dispose();

        public static double SecondsSince(long timestamp) =>
            (Stopwatch.GetTimestamp() - timestamp) / (double)Stopwatch.Frequency;

        private static async ValueTask ReadAsync(Transport transport, ReceiveBuffer buffer)
        {
            int count = await transport.ReadAsync(buffer.GetSpace()).ConfigureAwait(false);
            if (count == 0)
                throw new EndOfStreamException("the server has closed the connection");
            buffer.Advance(count);
        }

        private static async Task<ConnectReply> ReadReplyAsync(Transport transport, ReceiveBuffer buffer)
        {
            while (true)
            {
                while (buffer.TryReadFrame(out Frame frame))
                {
                    ReadOnlyMemory<byte> content = buffer.Bytes.AsMemory(frame.ContentOffset, frame.ContentLength);
                    if (frame.Type == FrameType.Connect)
                        return ConnectReply.Parse(content);
                    if (frame.Type == FrameType.Error)
                    {
                        ErrorReply error = ErrorReply.Parse(content);
                        throw new BusConnectionException($"{error.Code}: {error.Message}", error.Code);
                    }
                }
                await ReadAsync(transport, buffer).ConfigureAwait(false);
            }
        }
    }
}
