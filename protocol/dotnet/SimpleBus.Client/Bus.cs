using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client
{
    /// <summary>
    /// Connection of a program to a bus. It is thread-safe, reconnects by itself, and is meant to live as long as the
    /// program.
    /// <code>
    /// await using Bus bus = await Bus.ConnectAsync("simplebus://127.0.0.1:8888");
    /// await bus.PublishAsync("orders", new Order { Id = 1 });
    /// </code>
    /// </summary>
    public sealed class Bus : IAsyncDisposable
    {
        private const int PartMessages = 1024;
        private const int PartBytes = 64 * 1024;

        [ThreadStatic]
        private static EncodedMessages? t_encoded;

        private readonly BusOptions _options;
        private readonly object _lock = new object();
        private readonly HashSet<IStoppable> _consumers = new HashSet<IStoppable>();

        private Bus(BusConnection connection, BusOptions options)
        {
            Connection = connection;
            _options = options;
            Requests = new RequestReply(this);
        }

        /// <summary>True while there is a connection to a server.</summary>
        public bool IsConnected => Connection.IsConnected;

        /// <summary>Number of messages that were sent again after a lost connection.</summary>
        public long ResentCount => Connection.ResentCount;

        internal BusConnection Connection { get; }

        internal RequestReply Requests { get; }

        // Connecting ------------------------------------------------------------------------------

        /// <summary>Connect to a bus.</summary>
        /// <param name="address"><c>simplebus://host:port</c>, <c>simplebuss://host:port</c> for TLS, or
        /// <c>host:port</c>.</param>
        /// <param name="options">Settings; null for the defaults.</param>
        /// <param name="cancellationToken">Ends the attempt.</param>
        /// <returns>The connected bus.</returns>
        /// <exception cref="BusConnectionException">No server answers, or it refuses the client.</exception>
        /// <exception cref="ArgumentException">The address or a setting is not valid.</exception>
        public static Task<Bus> ConnectAsync(
            string address, BusOptions? options = null, CancellationToken cancellationToken = default) =>
            ConnectAsync(new[] { address }, options, cancellationToken);

        /// <summary>Connect to one of several servers of a bus, which are tried in turn.</summary>
        /// <param name="addresses">Addresses of the servers.</param>
        /// <param name="options">Settings; null for the defaults.</param>
        /// <param name="cancellationToken">Ends the attempt.</param>
        /// <returns>The connected bus.</returns>
        /// <exception cref="BusConnectionException">No server answers, or one refuses the client.</exception>
        /// <exception cref="ArgumentException">An address or a setting is not valid.</exception>
        public static async Task<Bus> ConnectAsync(
            IEnumerable<string> addresses, BusOptions? options = null, CancellationToken cancellationToken = default)
        {
            BusAddress[] parsed = addresses.Select(BusAddress.Parse).ToArray();
            if (parsed.Length == 0)
                throw new ArgumentException("at least one address is needed", nameof(addresses));
            options = (options ?? new BusOptions()).CopyValid();
            BusConnection connection = new BusConnection(parsed, options);
            await connection.OpenAsync(cancellationToken).ConfigureAwait(false);
            Bus bus = new Bus(connection, options);
            try
            {
                foreach (ClassReference named in options.Classes)
                    await connection.ResolveAsync(named, cancellationToken).ConfigureAwait(false);
            }
            catch
            {
                await connection.CloseAsync().ConfigureAwait(false);
                throw;
            }
            return bus;
        }

        // Publishing ------------------------------------------------------------------------------

        /// <summary>
        /// Publish a message, and wait until the server has stored it. Many calls may wait at the same time. If the
        /// connection is lost meanwhile, the message is sent again and stored once.
        /// </summary>
        /// <param name="target">Class of the message.</param>
        /// <param name="value">Bytes, or a value for the serializer.</param>
        /// <param name="options">Channel, key, headers and times; null for none.</param>
        /// <param name="cancellationToken">Ends waiting. A message that was queued is published nevertheless.</param>
        /// <typeparam name="T">Type of the value.</typeparam>
        /// <returns>Confirm of the server. Await it once.</returns>
        /// <exception cref="RefusedException">The server refuses the message.</exception>
        /// <exception cref="BusConnectionException">The connection is lost for good.</exception>
        /// <exception cref="ArgumentException">The message is too long.</exception>
        public ValueTask<Confirm> PublishAsync<T>(
            ClassReference target, T value, PublishOptions? options = null,
            CancellationToken cancellationToken = default) =>
            PublishEnvelopeAsync(target, value, options?.ToEnvelope(), cancellationToken);

        /// <summary>
        /// Publish many messages, and wait until the server has stored all of them. Their order is kept, and no other
        /// message of this bus comes between them.
        /// </summary>
        /// <param name="target">Class of the messages.</param>
        /// <param name="values">Bytes, or values for the serializer.</param>
        /// <param name="options">Metadata of every message; null for none.</param>
        /// <param name="cancellationToken">Ends waiting. Messages that were queued are published nevertheless.</param>
        /// <typeparam name="T">Type of the values.</typeparam>
        /// <returns>Confirm of the server. Await it once.</returns>
        /// <exception cref="RefusedException">The server refuses some of the messages, and stores the others.</exception>
        /// <exception cref="BusConnectionException">The connection is lost for good.</exception>
        /// <exception cref="ArgumentException">A message is too long; earlier ones may be published.</exception>
        public async ValueTask<Confirm> PublishManyAsync<T>(
            ClassReference target, IEnumerable<T> values, PublishOptions? options = null,
            CancellationToken cancellationToken = default)
        {
            Envelope? envelope = options?.ToEnvelope();
            using IEnumerator<T> next = values.GetEnumerator();
            EncodedMessages messages = new EncodedMessages();
            EncodeNext();
            return await Connection.PublishManyAsync(target, messages, EncodeNext, cancellationToken)
                .ConfigureAwait(false);

            bool EncodeNext()
            {
                messages.Clear();
                while (messages.Count < PartMessages && messages.ContentBytes < PartBytes && next.MoveNext())
                {
                    int before = messages.ContentBytes;
                    messages.Add(_options.Serializer, next.Current, envelope);
                    Connection.CheckLength(messages.ContentBytes - before);
                }
                return messages.Count > 0;
            }
        }

        /// <summary>Wait until the server has answered all messages that were published before.</summary>
        /// <param name="cancellationToken">Ends waiting.</param>
        /// <returns>A task that ends when all are stored or refused; each publish call reports its own refusal.</returns>
        /// <exception cref="BusConnectionException">The connection is lost for good.</exception>
        public ValueTask FlushAsync(CancellationToken cancellationToken = default) =>
            Connection.FlushAsync(cancellationToken);

        // Subscribing -----------------------------------------------------------------------------

        /// <summary>Subscribe to a class. The subscription begins with the loop over it, and ends with it.</summary>
        /// <param name="target">Class of the messages.</param>
        /// <param name="durable">Name under which the server keeps the position while the program is not connected.</param>
        /// <param name="group">Name of a group, whose members share one position: each message goes to one of
        /// them.</param>
        /// <param name="byKey">True to let the group process messages with equal keys one after the other.</param>
        /// <param name="channels">Patterns of channels, such as <c>orders.*</c> or <c>orders.#</c>. Null for all
        /// messages.</param>
        /// <param name="start">First message of a new subscription; null for <see cref="StartPosition.Waiting"/>.</param>
        /// <param name="autoAck">True to acknowledge a message when the loop asks for the next one.</param>
        /// <param name="delivery">Less common settings.</param>
        /// <param name="cancellationToken">Ends the loop.</param>
        /// <typeparam name="T">Type of the values: one that the serializer reads, or <c>byte[]</c> or
        /// <c>ReadOnlyMemory&lt;byte&gt;</c> for payloads.</typeparam>
        /// <returns>The subscription. A loop over it raises <see cref="RefusedException"/> if the server refuses
        /// it.</returns>
        public Subscription<T> SubscribeAsync<T>(
            ClassReference target, string? durable = null, string? group = null, bool byKey = false,
            IEnumerable<string>? channels = null, StartPosition? start = null, bool autoAck = true,
            DeliveryOptions? delivery = null, CancellationToken cancellationToken = default) =>
            new Subscription<T>(
                this, target, CreateRequest(durable, group, byKey, channels, start, delivery), autoAck,
                cancellationToken);

        /// <summary>
        /// Call a function for every message of a class, on the thread pool. A message is acknowledged when the function
        /// has returned. If it throws, the message is redelivered after the backoff, and the error is logged.
        /// </summary>
        /// <param name="target">Class of the messages.</param>
        /// <param name="handler">Function to call. Its token is cancelled when the handler is stopped by force.</param>
        /// <param name="concurrency">Maximum number of messages that are handled at the same time.</param>
        /// <param name="durable">As in <see cref="SubscribeAsync{T}"/>.</param>
        /// <param name="group">As in <see cref="SubscribeAsync{T}"/>.</param>
        /// <param name="byKey">As in <see cref="SubscribeAsync{T}"/>.</param>
        /// <param name="channels">As in <see cref="SubscribeAsync{T}"/>.</param>
        /// <param name="start">As in <see cref="SubscribeAsync{T}"/>.</param>
        /// <param name="delivery">As in <see cref="SubscribeAsync{T}"/>.</param>
        /// <param name="cancellationToken">Ends waiting for the subscription.</param>
        /// <typeparam name="T">Type of the values.</typeparam>
        /// <returns>The running handler.</returns>
        /// <exception cref="RefusedException">The server refuses the subscription.</exception>
        public async Task<MessageHandler> HandleAsync<T>(
            ClassReference target, Func<Message<T>, CancellationToken, ValueTask> handler, int concurrency = 1,
            string? durable = null, string? group = null, bool byKey = false, IEnumerable<string>? channels = null,
            StartPosition? start = null, DeliveryOptions? delivery = null,
            CancellationToken cancellationToken = default)
        {
            if (handler == null)
                throw new ArgumentNullException(nameof(handler));
            if (concurrency < 1)
                throw new ArgumentOutOfRangeException(nameof(concurrency), concurrency, "expected 1 or more");
            Inbox inbox = await Connection.SubscribeAsync(
                target, CreateRequest(durable, group, byKey, channels, start, delivery), true, cancellationToken)
                .ConfigureAwait(false);
            MessageHandler<T> running = new MessageHandler<T>(this, inbox, handler, concurrency);
            Add(running);
            return running;
        }

        // Request and reply -----------------------------------------------------------------------

        /// <summary>Publish a request and return the first reply to it.</summary>
        /// <param name="target">Class of the request.</param>
        /// <param name="request">Bytes, or a value for the serializer.</param>
        /// <param name="timeout">Time to wait for the reply, after which the request also expires; null for 5 s,
        /// <see cref="Timeout.InfiniteTimeSpan"/> for no limit.</param>
        /// <param name="options">Metadata of the request.</param>
        /// <param name="cancellationToken">Ends waiting.</param>
        /// <typeparam name="TRequest">Type of the request.</typeparam>
        /// <typeparam name="TReply">Type of the reply.</typeparam>
        /// <returns>The reply.</returns>
        /// <exception cref="TimeoutException">No reply arrived in time.</exception>
        /// <exception cref="RefusedException">The server refuses the request.</exception>
        public async Task<TReply> RequestAsync<TRequest, TReply>(
            ClassReference target, TRequest request, TimeSpan? timeout = null, PublishOptions? options = null,
            CancellationToken cancellationToken = default)
        {
            ReadOnlyMemory<byte> payload = await Requests.RequestAsync(
                target, request, timeout ?? TimeSpan.FromSeconds(5), options, cancellationToken).ConfigureAwait(false);
            return PayloadCodec.Read<TReply>(_options.Serializer, payload);
        }

        /// <summary>Answer the requests of a class: the value that the function returns is the reply.</summary>
        /// <param name="target">Class of the requests.</param>
        /// <param name="handler">Function to call.</param>
        /// <param name="concurrency">Maximum number of requests that are handled at the same time.</param>
        /// <param name="group">Name of a group of responders: each request goes to one of them.</param>
        /// <param name="cancellationToken">Ends waiting for the subscription.</param>
        /// <typeparam name="TRequest">Type of the requests.</typeparam>
        /// <typeparam name="TReply">Type of the replies.</typeparam>
        /// <returns>The running handler.</returns>
        /// <exception cref="RefusedException">The server refuses the subscription.</exception>
        public Task<MessageHandler> HandleRequestsAsync<TRequest, TReply>(
            ClassReference target, Func<Message<TRequest>, CancellationToken, ValueTask<TReply>> handler,
            int concurrency = 1, string? group = null, CancellationToken cancellationToken = default)
        {
            if (handler == null)
                throw new ArgumentNullException(nameof(handler));
            return HandleAsync<TRequest>(
                target,
                async (message, stopping) =>
                {
                    TReply reply = await handler(message, stopping).ConfigureAwait(false);
                    await message.ReplyAsync(reply, stopping).ConfigureAwait(false);
                },
                concurrency, group: group, cancellationToken: cancellationToken);
        }

        // Ending ----------------------------------------------------------------------------------

        /// <summary>
        /// Stop receiving: loops end when they ask for the next message, and handlers finish the messages that they
        /// process. Then wait until all messages are confirmed and all acknowledgements are stored. Messages that were
        /// not processed return to the server.
        /// </summary>
        /// <param name="cancellationToken">Ends waiting.</param>
        /// <returns>A task that ends when everything is done.</returns>
        /// <exception cref="BusConnectionException">The connection is lost for good, or was lost before all
        /// acknowledgements were sent.</exception>
        public async Task DrainAsync(CancellationToken cancellationToken = default)
        {
            long droppedBefore = Connection.DroppedAckCount;
            await StopConsumersAsync(cancellationToken).ConfigureAwait(false);
            await FlushAsync(cancellationToken).ConfigureAwait(false);
            await Connection.SyncAcksAsync(cancellationToken).ConfigureAwait(false);
            long dropped = Connection.DroppedAckCount - droppedBefore;
            if (dropped > 0)
                throw new BusConnectionException(
                    $"{dropped} acknowledgements were not sent, because the connection was lost: expect redeliveries");
        }

        /// <summary>
        /// Stop receiving, wait until all messages are confirmed, and close the connection. Handlers and confirms have
        /// <see cref="BusOptions.CloseTimeout"/> each. Publish calls that still wait then fail.
        /// </summary>
        /// <returns>A task that ends when the connection is closed.</returns>
        public async ValueTask DisposeAsync()
        {
            await DrainForAsync(_options.CloseTimeout, StopConsumersAsync).ConfigureAwait(false);
            // Handlers that used up their time must not cost the confirms of published messages.
            await DrainForAsync(_options.CloseTimeout, token => FlushAsync(token).AsTask()).ConfigureAwait(false);
            await Connection.CloseAsync().ConfigureAwait(false);
        }

        private async Task DrainForAsync(TimeSpan timeout, Func<CancellationToken, Task> drain)
        {
            using CancellationTokenSource limit = new CancellationTokenSource(timeout);
            try
            {
                await drain(limit.Token).ConfigureAwait(false);
            }
            catch (ObjectDisposedException)
            {
                // It is closed already.
            }
            catch (Exception error) when (error is OperationCanceledException || error is BusException)
            {
                Connection.Log(BusLogLevel.Warning, $"the bus did not drain before it closed: {error.Message}", error);
            }
        }

        internal void Add(IStoppable consumer)
        {
            lock (_lock)
                _consumers.Add(consumer);
        }

        internal void Remove(IStoppable consumer)
        {
            lock (_lock)
                _consumers.Remove(consumer);
        }

        internal ValueTask<Confirm> PublishEnvelopeAsync<T>(
            ClassReference target, T value, Envelope? envelope, CancellationToken cancellationToken)
        {
            if (cancellationToken.IsCancellationRequested)
                return new ValueTask<Confirm>(Task.FromCanceled<Confirm>(cancellationToken));
            // A serializer may publish, too, and must not get the same buffer.
            EncodedMessages messages = t_encoded ?? new EncodedMessages();
            t_encoded = null;
            messages.Clear();
            messages.Add(_options.Serializer, value, envelope);
            Connection.CheckLength(messages.ContentBytes);
            if (Connection.TryGetClassId(target, out ushort classId)
                && Connection.TryPublish(
                    messages.TypeOf(0), classId, messages.ContentOf(0), out ValueTask<Confirm> confirm))
            {
                t_encoded = messages;
                return BusConnection.WaitAsync(confirm, cancellationToken);
            }
            return Connection.PublishManyAsync(target, messages, () => false, cancellationToken);
        }

        private static SubscribeRequest CreateRequest(
            string? durable, string? group, bool byKey, IEnumerable<string>? channels, StartPosition? start,
            DeliveryOptions? delivery)
        {
            if (byKey && group == null)
                throw new ArgumentException("byKey is for groups: give a group, too", nameof(group));
            return new SubscribeRequest
            {
                Durable = durable,
                Group = group,
                ByKey = byKey,
                Channels = channels?.ToArray() ?? Array.Empty<string>(),
                Start = start ?? StartPosition.Waiting,
                Delivery = delivery ?? new DeliveryOptions(),
            };
        }

        private Task StopConsumersAsync(CancellationToken cancellationToken)
        {
            IStoppable[] consumers;
            lock (_lock)
                consumers = _consumers.ToArray();
            return Task.WhenAll(consumers.Select(consumer => consumer.StopAsync(cancellationToken)));
        }
    }
}
