using System;
using System.Buffers;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>Messages of one subscription that arrived together, in pooled memory.</summary>
    internal sealed class ReceivedBatch
    {
        private readonly byte[] _bytes;
        private readonly Entry[] _entries;
        private bool _isReleased;

        /// <param name="bytes">Pooled copy of the received frames.</param>
        /// <param name="entries">Pooled entries, whose offsets refer to the bytes.</param>
        /// <param name="count">Number of entries.</param>
        /// <param name="attempt">Delivery attempt of all messages.</param>
        public ReceivedBatch(byte[] bytes, Entry[] entries, int count, int attempt)
        {
            _bytes = bytes;
            _entries = entries;
            Count = count;
            Attempt = attempt;
        }

        public int Count { get; private set; }

        public int Attempt { get; }

        /// <summary>Acks of the position that the messages belong to.</summary>
        public AckBuffer Acks { get; set; } = null!;

        public ref Entry this[int index] => ref _entries[index];

        public ReadOnlyMemory<byte> ContentOf(int index)
        {
            CheckValid();
            return _bytes.AsMemory(_entries[index].ContentOffset, _entries[index].ContentLength);
        }

        /// <exception cref="ObjectDisposedException">The memory is used for other messages.</exception>
        public void CheckValid()
        {
            if (_isReleased)
                throw new ObjectDisposedException(
                    nameof(MessageBatch), "a batch is valid until the next one is requested");
        }

        /// <summary>Remove the messages for which <paramref name="isRemoved"/> returns true.</summary>
        public void RemoveAll(Func<long, bool> isRemoved)
        {
            int kept = 0;
            for (int index = 0; index < Count; index++)
                if (!isRemoved(_entries[index].Sequence))
                    _entries[kept++] = _entries[index];
            Count = kept;
        }

        /// <summary>Return the memory to the pool.</summary>
        public void Release()
        {
            if (_isReleased)
                return;
            _isReleased = true;
            ArrayPool<byte>.Shared.Return(_bytes);
            ArrayPool<Entry>.Shared.Return(_entries);
        }

        /// <summary>Place of a message in the bytes of its batch.</summary>
        internal struct Entry
        {
            public int ContentOffset;
            public int ContentLength;

            /// <summary>Sequence; the message id until the inbox has mapped it.</summary>
            public long Sequence;
            public bool IsEnvelope;
        }
    }
}
