using System;
using System.Buffers;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Collects the messages of one read that belong to the same subscription and attempt. Their frames are copied once,
    /// all together.
    /// </summary>
    internal sealed class BatchBuilder
    {
        private const int FirstEntries = 16;

        private ReceivedBatch.Entry[]? _entries;
        private int _count;
        private int _begin;
        private int _end;
        private bool _isDelivering;

        /// <summary>Class, attempt and subscription of the last Deliver.</summary>
        public ushort ClassId { get; private set; }

        public int Attempt { get; private set; }

        public ushort Subscription { get; private set; }

        public bool IsEmpty => _count == 0;

        /// <summary>Begin messages with another header. The batch before must have been built.</summary>
        public void SetDelivery(in Frame deliver)
        {
            ClassId = deliver.A;
            Attempt = (int)deliver.B;
            Subscription = deliver.C;
            _isDelivering = true;
        }

        /// <exception cref="FormatException">No Deliver has announced the message.</exception>
        public void Add(in Frame message)
        {
            if (!_isDelivering || message.A != ClassId)
                throw new FormatException($"the server sent a message of class {message.A} without a Deliver");
            if (_entries == null)
                _entries = ArrayPool<ReceivedBatch.Entry>.Shared.Rent(FirstEntries);
            else if (_count == _entries.Length)
                Grow();
            if (_count == 0)
                _begin = message.ContentOffset;
            ref ReceivedBatch.Entry entry = ref _entries[_count++];
            entry.ContentOffset = message.ContentOffset - _begin;
            entry.ContentLength = message.ContentLength;
            entry.Sequence = message.B & Frame.IdMask;
            entry.IsEnvelope = message.Type == FrameType.Envelope;
            _end = message.ContentOffset + message.ContentLength;
        }

        /// <summary>Return the messages as a batch.</summary>
        public ReceivedBatch Build(byte[] buffer)
        {
            byte[] bytes = ArrayPool<byte>.Shared.Rent(_end - _begin);
            Buffer.BlockCopy(buffer, _begin, bytes, 0, _end - _begin);
            ReceivedBatch batch = new ReceivedBatch(bytes, _entries!, _count, Attempt);
            _entries = null;
            _count = 0;
            return batch;
        }

        /// <summary>Discard the last Deliver, for a new connection.</summary>
        public void Reset()
        {
            _count = 0;
            _isDelivering = false;
        }

        /// <summary>Discard the messages, which belong to no subscription.</summary>
        public void Discard() => _count = 0;

        private void Grow()
        {
            ReceivedBatch.Entry[] grown = ArrayPool<ReceivedBatch.Entry>.Shared.Rent(2 * _entries!.Length);
            Array.Copy(_entries, grown, _count);
            ArrayPool<ReceivedBatch.Entry>.Shared.Return(_entries);
            _entries = grown;
        }
    }
}
