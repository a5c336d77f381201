using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Protocol state of one client, across all its connections.
    /// <para>One task reads; it never runs code of the program. A call that adds frames also writes them, unless a write
    /// is running, which then includes them. All state is protected by one lock, under which nothing waits. Order of
    /// locks: connection, inbox.</para>
    /// <para>A connection begins with Connect, its reply, open requests, Subscribes, and unconfirmed messages.</para>
    /// </summary>
    internal sealed partial class BusConnection
    {
        private const double AttemptSecondsMax = 86_400;
        private const int AckDelayMilliseconds = 50;
        private const double ServerHeartbeatSeconds = 30; // The default of the server.
        private const int SubscriptionsMax = ushort.MaxValue;
        private static readonly TimeSpan ShutdownTimeout = TimeSpan.FromSeconds(2);

        private readonly object _lock = new object();
        private readonly BusOptions _options;
        private readonly BusAddress[] _addresses;
        private readonly ConnectRequest _connectRequest;
        private readonly ReconnectSchedule _schedule;
        private readonly Random _random = new Random();
        private readonly ClassRegistry _classes = new ClassRegistry();
        private readonly PublishBuffer _publishBuffer = new PublishBuffer();
        private readonly PendingConfirms _confirms = new PendingConfirms();
        private readonly SortedDictionary<uint, OpenRequest> _requests = new SortedDictionary<uint, OpenRequest>();
        private readonly Dictionary<ushort, Inbox> _inboxes = new Dictionary<ushort, Inbox>();
        private readonly SemaphoreSlim _publishTurn = new SemaphoreSlim(1, 1);
        private readonly CancellationTokenSource _closing = new CancellationTokenSource();
        private readonly BatchBuilder _batch = new BatchBuilder();
        private readonly Timer _ackTimer;
        private ByteWriter _control = new ByteWriter();
        private ByteWriter _controlBeingWritten = new ByteWriter();
        private Session? _session;
        private Task _running = Task.CompletedTask;
        private TaskCompletionSource<bool>? _space;
        private int _waitingPublishers;
        private int _isAckTimerArmed;
        private bool _areAcksDue;
        private long _droppedAckCount;
        private uint _lastRequestNumber;
        private ushort _lastSubscriptionNumber;
        private int _frameBytesMax = 1 << 20;
        private Durability _level;
        private string _bus = "";
        private string _run = "";
        private BusConnectionException? _lostError;
        private bool _isClosed;

        public BusConnection(BusAddress[] addresses, BusOptions options)
        {
            _addresses = addresses;
            _options = options;
            _schedule = new ReconnectSchedule(addresses.Length);
            _connectRequest = new ConnectRequest
            {
                Name = options.Name ?? "anonymous-" + Guid.NewGuid().ToString("N"),
                Instance = Guid.NewGuid().ToString("N"),
                Client = "SimpleBus.Client for .NET",
                HeartbeatSeconds = options.Heartbeat.TotalSeconds,
                User = options.User,
                Password = options.Password,
                Token = options.Token,
            };
            _ackTimer = WithoutContext(
                () => new Timer(state => ((BusConnection)state!).SendAcks(), this, Timeout.Infinite, Timeout.Infinite));
        }

        public IBusSerializer Serializer => _options.Serializer;

        /// <summary>Cancelled when the bus closes or is lost for good.</summary>
        public CancellationToken Closing => _closing.Token;

        /// <summary>Prefix of the channels on which this client may receive replies.</summary>
        public string ReplyPrefix { get; private set; } = "";

        public bool IsConnected
        {
            get
            {
                lock (_lock)
                    return _session != null;
            }
        }

        /// <summary>Number of acks of ended subscriptions that could not be sent, because there was no
        /// connection.</summary>
        public long DroppedAckCount
        {
            get
            {
                lock (_lock)
                    return _droppedAckCount;
            }
        }

        public long ResentCount
        {
            get
            {
                lock (_lock)
                    return _publishBuffer.ResentCount;
            }
        }

        // Opening and closing ---------------------------------------------------------------------

        /// <summary>Connect for the first time.</summary>
        public async Task OpenAsync(CancellationToken cancellationToken)
        {
            Session session = await ConnectAsync(_options.ConnectTimeout, true, cancellationToken).ConfigureAwait(false);
            Resume(session);
            _running = WithoutContext(() => Task.Run(() => RunAsync(session)));
        }

        /// <summary>Start a task that outlives the call, without the AsyncLocal values of the caller.</summary>
        private static T WithoutContext<T>(Func<T> start)
        {
            if (ExecutionContext.IsFlowSuppressed())
                return start();
            using (ExecutionContext.SuppressFlow())
                return start();
        }

        /// <summary>Send everything that is queued, and close the connection.</summary>
        public async Task CloseAsync()
        {
            lock (_lock)
            {
                if (_isClosed)
                    return;
                _isClosed = true;
            }
            _ackTimer.Dispose();
            SendAcks();
            Session? session;
            Task writerIdle;
            lock (_lock)
            {
                session = _session;
                writerIdle = session?.WhenWriterIdle() ?? Task.CompletedTask;
            }
            CancelClosing();
            if (session != null)
            {
                await Task.WhenAny(writerIdle, Task.Delay(ShutdownTimeout)).ConfigureAwait(false);
                // Closing with unread bytes would make TCP discard the bytes just written. The server
                // closes when it has read all bytes. If it reads nothing, the shutdown of TLS does not end.
                Task shutdown = session.ShutdownAsync();
                ObserveFailure(shutdown);
                await Task.WhenAny(shutdown, Task.Delay(ShutdownTimeout)).ConfigureAwait(false);
                await Task.WhenAny(_running, Task.Delay(ShutdownTimeout)).ConfigureAwait(false);
                session.Dispose();
            }
            await _running.ConfigureAwait(false);
        }

        /// <summary>Throw if the bus is closed or lost for good.</summary>
        public void CheckOpen()
        {
            if (_isClosed)
                throw new ObjectDisposedException(nameof(Bus));
            if (_lostError != null)
                throw new BusConnectionException(_lostError.Message, _lostError.Code, _lostError);
        }

        public void Log(BusLogLevel level, string text, Exception? error = null)
        {
            try
            {
                _options.Log?.Invoke(level, text, error);
            }
            catch (Exception)
            {
                // A broken logger must not end the connection.
            }
        }

        // Connections -----------------------------------------------------------------------------

        /// <summary>Serve one connection after the other until the bus closes or is lost for good. Never fails.</summary>
        private async Task RunAsync(Session? session)
        {
            while (session != null)
            {
                Exception error = await ServeAsync(session).ConfigureAwait(false);
                session.Dispose();
                await DetachAsync(session).ConfigureAwait(false);
                _schedule.MarkLost(Session.SecondsSince(session.OpenedAt));
                session = await ReconnectAsync(error).ConfigureAwait(false);
            }
        }

        private async Task<Session?> ReconnectAsync(Exception error)
        {
            try
            {
                _closing.Token.ThrowIfCancellationRequested();
                Log(BusLogLevel.Warning, $"connection lost: {error.Message}", error);
                string? code = (error as BusException)?.Code;
                if (!ReconnectSchedule.IsTemporary(code) || _options.ReconnectTimeout == TimeSpan.Zero)
                    throw new BusConnectionException($"the connection is lost: {error.Message}", code, error);
                Session session =
                    await ConnectAsync(_options.ReconnectTimeout, false, _closing.Token).ConfigureAwait(false);
                Resume(session);
                return session;
            }
            catch (Exception failure)
            {
                BusConnectionException lost = failure as BusConnectionException
                    ?? new BusConnectionException("the bus is closed", null, failure);
                if (!_isClosed)
                    Log(BusLogLevel.Error, $"the connection is lost for good: {lost.Message}", lost);
                FailEverything(lost);
                return null;
            }
        }

        /// <summary>
        /// Connect to one of the addresses, the first time with one attempt for each of them, which is repeated while the
        /// server may not have noticed the end of the program's previous run.
        /// </summary>
        /// <exception cref="BusConnectionException">No server accepts the client in time.</exception>
        private async Task<Session> ConnectAsync(TimeSpan timeout, bool isFirst, CancellationToken cancellationToken)
        {
            double timeoutSeconds = ToSeconds(timeout);
            long firstAt = System.Diagnostics.Stopwatch.GetTimestamp();
            long startedAt = firstAt;
            BusConnectionException? failure = null;
            for (int attempts = 1; ; attempts++)
            {
                (int index, double delay) = _schedule.NextAttempt(NextRandom());
                if (isFirst)
                    delay = Math.Min(delay, timeoutSeconds / 2);
                double left = timeoutSeconds - Session.SecondsSince(startedAt);
                if (left <= delay || (isFirst && attempts > _addresses.Length))
                    throw failure ?? new BusConnectionException("no server replied within the time limit");
                await Task.Delay(TimeSpan.FromSeconds(delay), cancellationToken).ConfigureAwait(false);
                double limit = isFirst
                    ? left / (_addresses.Length - attempts + 1)
                    : Math.Min(left - delay, ToSeconds(_options.ConnectTimeout));
                try
                {
                    Session session = await Session.OpenAsync(
                        _addresses[index], _options.Tls, WriteConnect(), TimeSpan.FromSeconds(Math.Min(limit, AttemptSecondsMax)),
                        cancellationToken).ConfigureAwait(false);
                    _schedule.MarkConnected();
                    return session;
                }
                catch (BusConnectionException error) when (ReconnectSchedule.IsTemporary(error.Code))
                {
                    failure = error;
                    Log(BusLogLevel.Debug, error.Message, error);
                }
                catch (BusConnectionException error)
                    when (isFirst && error.Code == "name_in_use" && Session.SecondsSince(firstAt) < NameRetrySeconds)
                {
                    failure = error;
                    Log(BusLogLevel.Information, error.Message, error);
                    attempts = 0;
                    startedAt = System.Diagnostics.Stopwatch.GetTimestamp();
                }
            }
        }

        /// <summary>Somewhat more than three heartbeats, after which a server closes a silent connection.</summary>
        private double NameRetrySeconds =>
            3.5 * (_options.Heartbeat > TimeSpan.Zero ? _options.Heartbeat.TotalSeconds : ServerHeartbeatSeconds);

        private static double ToSeconds(TimeSpan time) =>
            time == Timeout.InfiniteTimeSpan ? double.MaxValue : time.TotalSeconds;

        private double NextRandom()
        {
            lock (_random)
                return _random.NextDouble();
        }

        private ReadOnlyMemory<byte> WriteConnect()
        {
            ByteWriter content = new ByteWriter();
            lock (_lock)
            {
                if (_bus.Length > 0)
                {
                    _connectRequest.Bus = _bus;
                    _connectRequest.Unconfirmed = _publishBuffer.FirstUnconfirmedNumber;
                }
                _connectRequest.Write(content, _classes.ToList());
            }
            ByteWriter frame = new ByteWriter();
            Frame.Append(frame, FrameType.Connect, 0, 0, 0, content.WrittenSpan);
            return frame.WrittenMemory;
        }

        /// <summary>Continue on a new connection.</summary>
        /// <exception cref="ObjectDisposedException">The bus was closed meanwhile, and has not seen the
        /// connection.</exception>
        private void Resume(Session session)
        {
            ConnectReply reply = session.Reply;
            Session? writing;
            lock (_lock)
            {
                if (_isClosed)
                {
                    session.Dispose();
                    throw new ObjectDisposedException(nameof(Bus));
                }
                bool isSameBus = _bus.Length == 0 || _bus == reply.Bus;
                _level = reply.Level;
                _frameBytesMax = reply.FrameBytes;
                _bus = reply.Bus;
                _run = reply.Run;
                ReplyPrefix = reply.ReplyPrefix;
                _publishBuffer.Resume(reply.Next, reply.CreditBytes, isSameBus);
                Confirmed();
                foreach (OpenRequest request in _requests.Values.ToList())
                    if (request.Type == FrameType.Subscribe)
                        _requests.Remove(request.Number);
                    else
                        SendRequest(request, 0, 0);
                foreach (Inbox inbox in _inboxes.Values)
                    SendSubscribe(inbox);
                _session = session;
                writing = TryBeginWriting();
            }
            Log(BusLogLevel.Information, $"connected to bus {reply.Bus}, session {reply.Session}");
            if (reply.LostCount > 0)
                Log(BusLogLevel.Warning, $"the server has lost {reply.LostCount} messages that it had confirmed");
            StartWriting(writing, false);
        }

        private async Task DetachAsync(Session session)
        {
            Task writerIdle;
            lock (_lock)
            {
                _session = null;
                writerIdle = session.WhenWriterIdle();
            }
            await writerIdle.ConfigureAwait(false);
            lock (_lock)
            {
                _control.Clear();
                _publishBuffer.ConnectionLost();
                foreach (Inbox inbox in _inboxes.Values)
                    inbox.ConnectionLost();
                // The subscription has ended with its session.
                foreach (OpenRequest request in _requests.Values.ToList())
                    if (request.Type == FrameType.Unsubscribe && _requests.Remove(request.Number))
                        request.SetReply(default);
            }
        }

        private void FailEverything(BusConnectionException error)
        {
            List<Inbox> inboxes;
            lock (_lock)
            {
                _lostError = error;
                _confirms.Fail(() => new BusConnectionException(error.Message, error.Code, error));
                foreach (OpenRequest request in _requests.Values)
                    request.SetException(new BusConnectionException(error.Message, error.Code, error));
                _requests.Clear();
                inboxes = _inboxes.Values.ToList();
                _inboxes.Clear();
                _space?.TrySetResult(true);
            }
            foreach (Inbox inbox in inboxes)
                inbox.End(_isClosed ? null : error);
            CancelClosing();
        }

        private void CancelClosing()
        {
            try
            {
                _closing.Cancel();
            }
            catch (AggregateException error)
            {
                Log(BusLogLevel.Error, "a cancellation callback failed", error);
            }
        }
    }
}
