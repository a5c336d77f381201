using System;
using System.Collections.Concurrent;
using System.Collections.Generic;
using System.Globalization;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Requests and their replies.
    /// <para>A request has the headers reply-to, a channel of the class of replies on which this bus listens; reply-class,
    /// the id of that class; and request-id. A reply has the header request-id. A bus has one subscription for all
    /// replies, from its first request on.</para>
    /// </summary>
    internal sealed class RequestReply
    {
        private const string RepliesClass = "simplebus.replies";
        private const string ReplyToHeader = "reply-to";
        private const string ReplyClassHeader = "reply-class";
        private const string RequestIdHeader = "request-id";

        private static readonly TimeSpan OneMillisecond = TimeSpan.FromMilliseconds(1);

        private readonly Bus _bus;
        private readonly object _lock = new object();
        private readonly ConcurrentDictionary<string, TaskCompletionSource<ReadOnlyMemory<byte>>> _pending =
            new ConcurrentDictionary<string, TaskCompletionSource<ReadOnlyMemory<byte>>>();
        private readonly string _channelName = Guid.NewGuid().ToString("N").Substring(0, 16);
        private Task<Inbox>? _subscribing;
        private long _requestCount;

        public RequestReply(Bus bus)
        {
            _bus = bus;
        }

        /// <summary>Publish a request and return the payload of its reply.</summary>
        public async Task<ReadOnlyMemory<byte>> RequestAsync<T>(
            ClassReference target, T value, TimeSpan timeout, PublishOptions? options, CancellationToken cancellationToken)
        {
            bool isLimited = timeout != Timeout.InfiniteTimeSpan;
            if (isLimited && timeout < OneMillisecond)
                throw new ArgumentOutOfRangeException(nameof(timeout), timeout, "expected 1 ms or more, or infinite");
            string id = Interlocked.Increment(ref _requestCount).ToString(CultureInfo.InvariantCulture);
            Envelope envelope = (options ?? new PublishOptions()).ToEnvelope();
            if (isLimited)
                envelope.ExpiresMilliseconds ??= (ulong)timeout.TotalMilliseconds;
            TaskCompletionSource<ReadOnlyMemory<byte>> reply =
                new TaskCompletionSource<ReadOnlyMemory<byte>>(TaskCreationOptions.RunContinuationsAsynchronously);
            using CancellationTokenSource limit = CancellationTokenSource.CreateLinkedTokenSource(
                cancellationToken, _bus.Connection.Closing);
            limit.CancelAfter(timeout);
            try
            {
                Inbox inbox = await SubscribeAsync(limit.Token).ConfigureAwait(false);
                envelope.Headers = new List<KeyValuePair<string, string>>(envelope.Headers)
                {
                    Header(ReplyToHeader, inbox.Request.Channels[0]),
                    Header(ReplyClassHeader, inbox.ClassId.ToString(CultureInfo.InvariantCulture)),
                    Header(RequestIdHeader, id),
                };
                _pending[id] = reply;
                _ = FailIfRefusedAsync(_bus.PublishEnvelopeAsync(target, value, envelope, limit.Token), reply);
                return await BusConnection.WaitAsync(
                    new ValueTask<ReadOnlyMemory<byte>>(reply.Task), limit.Token).ConfigureAwait(false);
            }
            catch (OperationCanceledException) when (!cancellationToken.IsCancellationRequested)
            {
                _bus.Connection.CheckOpen();
                throw new TimeoutException(
                    $"received no reply to the request of class {target} within {timeout.TotalSeconds:0.###} s");
            }
            finally
            {
                _pending.TryRemove(id, out _);
            }
        }

        /// <summary>Reply to a received request.</summary>
        public async ValueTask<Confirm> ReplyAsync<T>(Envelope request, T value, CancellationToken cancellationToken)
        {
            string? channel = FindHeader(request, ReplyToHeader);
            string? id = FindHeader(request, RequestIdHeader);
            string? replyClass = FindHeader(request, ReplyClassHeader);
            if (channel == null || id == null || replyClass == null)
                throw new InvalidOperationException("the message does not request a reply");
            ushort classId = await _bus.Connection.ResolveAsync(RepliesClass, cancellationToken).ConfigureAwait(false);
            // A responder may have more permissions than the requester.
            if (replyClass != classId.ToString(CultureInfo.InvariantCulture)
                || !channel.StartsWith(RepliesClass + ".", StringComparison.Ordinal))
                throw new InvalidOperationException(
                    $"a reply was requested on channel '{channel}' of class {replyClass}, which is not for replies");
            Envelope reply = new Envelope
            {
                Channel = channel,
                ExpiresMilliseconds = request.ExpiresMilliseconds,
                Headers = new[] { Header(RequestIdHeader, id) },
            };
            return await _bus.PublishEnvelopeAsync(classId, value, reply, cancellationToken).ConfigureAwait(false);
        }

        private static KeyValuePair<string, string> Header(string name, string value) =>
            new KeyValuePair<string, string>(name, value);

        private static string? FindHeader(Envelope envelope, string name) =>
            envelope.Headers.LastOrDefault(header => header.Key == name).Value;

        private static async Task FailIfRefusedAsync(
            ValueTask<Confirm> confirm, TaskCompletionSource<ReadOnlyMemory<byte>> reply)
        {
            try
            {
                await confirm.ConfigureAwait(false);
            }
            catch (Exception error)
            {
                reply.TrySetException(error);
                _ = reply.Task.Exception; // The requester may have stopped waiting.
            }
        }

        private Task<Inbox> SubscribeAsync(CancellationToken cancellationToken)
        {
            Task<Inbox> subscribing;
            lock (_lock)
            {
                if (_subscribing == null || _subscribing.IsFaulted || _subscribing.IsCanceled)
                    _subscribing = StartAsync();
                subscribing = _subscribing;
            }
            return BusConnection.WaitAsync(new ValueTask<Inbox>(subscribing), cancellationToken).AsTask();
        }

        private async Task<Inbox> StartAsync()
        {
            string prefix = _bus.Connection.ReplyPrefix;
            SubscribeRequest request = new SubscribeRequest
            {
                Channels = new[] { (prefix.Length > 0 ? prefix : RepliesClass + ".") + _channelName },
                Start = StartPosition.New,
            };
            Inbox inbox = await _bus.Connection.SubscribeAsync(RepliesClass, request, true, CancellationToken.None)
                .ConfigureAwait(false);
            _ = Task.Run(() => ReadRepliesAsync(inbox));
            return inbox;
        }

        private async Task ReadRepliesAsync(Inbox inbox)
        {
            try
            {
                while (true)
                {
                    ReceivedBatch? batch = inbox.TryDequeueBatch(out bool isEnded);
                    if (isEnded)
                        return;
                    if (batch == null)
                    {
                        await inbox.WaitAsync().ConfigureAwait(false);
                        continue;
                    }
                    for (int index = 0; index < batch.Count; index++)
                        AcceptReply(batch, index);
                    inbox.Ack(batch);
                    inbox.Release(batch);
                }
            }
            catch (BusException)
            {
                lock (_lock)
                    _subscribing = null; // The next request subscribes again, or fails.
            }
        }

        private void AcceptReply(ReceivedBatch batch, int index)
        {
            if (!batch[index].IsEnvelope)
                return;
            try
            {
                Envelope envelope = Envelope.Decode(batch.ContentOf(index).ToArray(), out ReadOnlyMemory<byte> payload);
                string? id = FindHeader(envelope, RequestIdHeader);
                if (id != null && _pending.TryRemove(id, out TaskCompletionSource<ReadOnlyMemory<byte>>? reply))
                    reply.TrySetResult(payload);
            }
            catch (FormatException error)
            {
                _bus.Connection.Log(BusLogLevel.Warning, "dropped a malformed reply", error);
            }
        }
    }
}
