using System;
using System.Collections.Generic;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client
{
    /// <summary>A received message.</summary>
    /// <typeparam name="T">Type of its value.</typeparam>
    public sealed class Message<T>
    {
        private readonly Bus _bus;
        private readonly Inbox _inbox;
        private readonly AckBuffer _acks;
        private readonly Envelope _envelope;
        private int _isSettled;

        private Message(Bus bus, Inbox inbox, ReceivedBatch batch, int index, Envelope envelope, T value)
        {
            _bus = bus;
            _inbox = inbox;
            _acks = batch.Acks;
            _envelope = envelope;
            Sequence = batch[index].Sequence;
            Attempt = batch.Attempt;
            Value = value;
        }

        /// <summary>The value.</summary>
        public T Value { get; }

        /// <summary>Id of the class.</summary>
        public int ClassId => _inbox.ClassId;

        /// <summary>Number of the message in its class.</summary>
        public long Sequence { get; }

        /// <summary>1 for the first delivery, 2 and more for redeliveries.</summary>
        public int Attempt { get; }

        /// <summary>Channel; null without one.</summary>
        public string? Channel => _envelope.Channel.Length > 0 ? _envelope.Channel : null;

        /// <summary>Key; empty without one.</summary>
        public ReadOnlyMemory<byte> Key => _envelope.Key;

        /// <summary>Headers, in order; names may repeat.</summary>
        public IReadOnlyList<KeyValuePair<string, string>> Headers => _envelope.Headers;

        /// <summary>Time of the event by the publisher's clock; null if it gave none.</summary>
        public DateTimeOffset? PublishedAt => _envelope.PublishedMicroseconds.HasValue
            ? DateTimeOffset.UnixEpoch.AddTicks(_envelope.PublishedMicroseconds.Value * 10) : (DateTimeOffset?)null;

        /// <summary>True if the message was acknowledged or rejected.</summary>
        public bool IsSettled => Volatile.Read(ref _isSettled) != 0;

        internal Envelope Envelope => _envelope;

        /// <summary>Return the value of a header, the last one if its name repeats; null without one.</summary>
        /// <param name="name">Name of the header.</param>
        /// <returns>Its value.</returns>
        public string? GetHeader(string name)
        {
            for (int index = Headers.Count - 1; index >= 0; index--)
                if (Headers[index].Key == name)
                    return Headers[index].Value;
            return null;
        }

        /// <summary>Acknowledge the message. The client sends acknowledgements together, within 50 ms.</summary>
        /// <returns>A completed task.</returns>
        public ValueTask AckAsync()
        {
            if (TrySettle())
                _inbox.Ack(_acks, Sequence, Sequence + 1);
            return default;
        }

        /// <summary>Reject the message, so that it is redelivered.</summary>
        /// <param name="delay">Time until the redelivery. Null for the backoff of the class.</param>
        /// <param name="error">Reason, which a dead letter keeps.</param>
        /// <returns>A completed task.</returns>
        public ValueTask NackAsync(TimeSpan? delay = null, string? error = null)
        {
            if (delay < TimeSpan.Zero)
                throw new ArgumentOutOfRangeException(nameof(delay), delay, "a delay must not be negative");
            string option = delay.HasValue
                ? ((long)delay.Value.TotalMilliseconds).ToString(System.Globalization.CultureInfo.InvariantCulture) : "";
            if (TrySettle())
                _inbox.Settle(_acks, FrameType.Nack, Sequence, Attempt, option, error);
            return default;
        }

        /// <summary>Restart the ack timeout, because processing takes longer.</summary>
        /// <returns>A completed task.</returns>
        public ValueTask WorkingAsync()
        {
            if (!IsSettled)
                _inbox.Settle(_acks, FrameType.Working, Sequence, Attempt);
            return default;
        }

        /// <summary>Make the message a dead letter, because no attempt will succeed.</summary>
        /// <param name="error">Reason, which the dead letter keeps.</param>
        /// <returns>A completed task.</returns>
        public ValueTask TerminateAsync(string? error = null)
        {
            if (TrySettle())
                _inbox.Settle(_acks, FrameType.Nack, Sequence, Attempt, "terminate", error);
            return default;
        }

        /// <summary>Send a reply to a request.</summary>
        /// <param name="reply">Value of the reply.</param>
        /// <param name="cancellationToken">Ends waiting.</param>
        /// <typeparam name="TReply">Type of the reply.</typeparam>
        /// <returns>Confirm of the reply.</returns>
        /// <exception cref="InvalidOperationException">The message does not request a reply.</exception>
        public ValueTask<Confirm> ReplyAsync<TReply>(TReply reply, CancellationToken cancellationToken = default) =>
            _bus.Requests.ReplyAsync(Envelope, reply, cancellationToken);

        /// <summary>Return a message of a batch, or null after rejecting one that cannot be decoded.</summary>
        internal static Message<T>? Create(Bus bus, Inbox inbox, ReceivedBatch batch, int index)
        {
            long sequence = batch[index].Sequence;
            try
            {
                ReadOnlyMemory<byte> payload = batch.ContentOf(index);
                Envelope envelope = Envelope.Empty;
                if (batch[index].IsEnvelope)
                    envelope = Envelope.Decode(payload.ToArray(), out payload);
                else if (typeof(T) == typeof(ReadOnlyMemory<byte>))
                    payload = payload.ToArray(); // The memory of the batch is reused, but the program keeps the value.
                T value = PayloadCodec.Read<T>(bus.Connection.Serializer, payload);
                return new Message<T>(bus, inbox, batch, index, envelope, value);
            }
            catch (Exception error)
            {
                bus.Connection.Log(
                    BusLogLevel.Warning,
                    $"message {sequence} of class {inbox.ClassId} cannot be decoded as {typeof(T)}: {error.Message}", error);
                inbox.Settle(batch.Acks, FrameType.Nack, sequence, batch.Attempt, "", error.Message);
                return null;
            }
        }

        /// <summary>Let the next subscription receive the message at once, because it was not processed.</summary>
        internal void Return()
        {
            if (TrySettle())
                _inbox.Return(_acks, Sequence);
        }

        private bool TrySettle() => Interlocked.Exchange(ref _isSettled, 1) == 0;
    }
}
