using System;
using System.Collections.Generic;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client
{
    /// <summary>
    /// Messages that arrived together. They are in memory that is reused: a batch, with its acknowledgements, is valid
    /// until the next one is requested.
    /// </summary>
    public sealed class MessageBatch
    {
        private readonly Inbox _inbox;
        private readonly ReceivedBatch _batch;
        private readonly IBusSerializer _serializer;
        private HashSet<int>? _settledIndexes;
        private bool _isSettled;

        internal MessageBatch(Inbox inbox, ReceivedBatch batch, IBusSerializer serializer)
        {
            _inbox = inbox;
            _batch = batch;
            _serializer = serializer;
        }

        /// <summary>Number of messages.</summary>
        public int Count => _batch.Count;

        /// <summary>Id of the class.</summary>
        public int ClassId => _inbox.ClassId;

        /// <summary>Delivery attempt of all messages: 1 for the first.</summary>
        public int Attempt => _batch.Attempt;

        /// <summary>Return a message.</summary>
        /// <param name="index">Index from 0 to Count - 1.</param>
        public BatchMessage this[int index]
        {
            get
            {
                if ((uint)index >= (uint)Count)
                    throw new ArgumentOutOfRangeException(nameof(index));
                return new BatchMessage(_batch, index, _serializer);
            }
        }

        /// <summary>Acknowledge all messages, except those that were rejected.</summary>
        /// <returns>A completed task.</returns>
        public ValueTask AckAsync()
        {
            if (_isSettled)
                return default;
            if (_settledIndexes == null)
                _inbox.Ack(_batch);
            else
                for (int index = 0; index < Count; index++)
                    AckMessage(index);
            _isSettled = true;
            return default;
        }

        /// <summary>Acknowledge one message.</summary>
        /// <param name="index">Index of the message.</param>
        /// <returns>A completed task.</returns>
        public ValueTask AckAsync(int index)
        {
            AckMessage(index);
            return default;
        }

        /// <summary>Reject one message, so that it is redelivered.</summary>
        /// <param name="index">Index of the message.</param>
        /// <param name="error">Reason, which a dead letter keeps.</param>
        /// <returns>A completed task.</returns>
        public ValueTask NackAsync(int index, string? error = null)
        {
            long sequence = this[index].Sequence;
            if (TrySettle(index))
                _inbox.Settle(_batch.Acks, FrameType.Nack, sequence, Attempt, "", error);
            return default;
        }

        private void AckMessage(int index)
        {
            long sequence = this[index].Sequence;
            if (TrySettle(index))
                _inbox.Ack(_batch.Acks, sequence, sequence + 1);
        }

        private bool TrySettle(int index) =>
            !_isSettled && (_settledIndexes ??= new HashSet<int>()).Add(index);
    }

    /// <summary>One message of a batch.</summary>
    public readonly struct BatchMessage
    {
        private readonly ReceivedBatch _batch;
        private readonly int _index;
        private readonly IBusSerializer _serializer;

        internal BatchMessage(ReceivedBatch batch, int index, IBusSerializer serializer)
        {
            _batch = batch;
            _index = index;
            _serializer = serializer;
        }

        /// <summary>Number of the message in its class.</summary>
        public long Sequence
        {
            get
            {
                _batch.CheckValid();
                return _batch[_index].Sequence;
            }
        }

        /// <summary>Payload, valid until the next batch is requested.</summary>
        public ReadOnlyMemory<byte> Payload
        {
            get
            {
                ReadOnlyMemory<byte> content = _batch.ContentOf(_index);
                if (_batch[_index].IsEnvelope)
                    Envelope.Decode(content, out content);
                return content;
            }
        }

        /// <summary>Channel; null without one.</summary>
        public string? Channel => Metadata.Channel.Length > 0 ? Metadata.Channel : null;

        /// <summary>Key; empty without one.</summary>
        public ReadOnlyMemory<byte> Key => Metadata.Key;

        /// <summary>Headers, in order; names may repeat.</summary>
        public IReadOnlyList<KeyValuePair<string, string>> Headers => Metadata.Headers;

        private Envelope Metadata => _batch[_index].IsEnvelope
            ? Envelope.Decode(_batch.ContentOf(_index), out ReadOnlyMemory<byte> _) : Envelope.Empty;

        /// <summary>Return the payload as a value.</summary>
        /// <typeparam name="T">Type of the value.</typeparam>
        /// <returns>The value.</returns>
        public T GetValue<T>() => PayloadCodec.Read<T>(_serializer, Payload);
    }
}
