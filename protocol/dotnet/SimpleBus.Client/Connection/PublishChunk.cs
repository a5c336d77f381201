using System;
using System.Buffers;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Consecutive published messages as encoded frames.
    /// <para>Invariant: 0 &lt;= ConfirmedCount &lt;= SentCount &lt;= MessageCount.</para>
    /// </summary>
    internal sealed class PublishChunk
    {
        private const int CommonBytes = 64 * 1024;
        private const int MessagesMax = 4096;

        private readonly int[] _ends = ArrayPool<int>.Shared.Rent(MessagesMax);

        public PublishChunk(long firstPosition, int firstFrameBytes)
        {
            FirstPosition = firstPosition;
            Bytes = ArrayPool<byte>.Shared.Rent(Math.Max(CommonBytes, firstFrameBytes));
        }

        public byte[] Bytes { get; }

        /// <summary>Position of the first message.</summary>
        public long FirstPosition { get; }

        public int MessageCount { get; private set; }

        /// <summary>Messages released for sending on this connection, or confirmed.</summary>
        public int SentCount { get; set; }

        public int ConfirmedCount { get; set; }

        /// <summary>Next chunk; null if this is the last.</summary>
        public PublishChunk? Next { get; set; }

        /// <summary>True while a write uses the bytes.</summary>
        public bool IsBeingWritten { get; set; }

        public bool IsConfirmed => ConfirmedCount == MessageCount;

        public bool HasRoom(int frameBytes) =>
            MessageCount < MessagesMax && Bytes.Length - OffsetOf(MessageCount) >= frameBytes;

        /// <summary>Return the offset of message <paramref name="index"/>, or the end of the last one.</summary>
        public int OffsetOf(int index) => index == 0 ? 0 : _ends[index - 1];

        /// <summary>Return the space after the last message.</summary>
        public Span<byte> GetSpace() => Bytes.AsSpan(OffsetOf(MessageCount));

        /// <summary>Add a message whose frame was written to that space.</summary>
        public void Add(int frameBytes)
        {
            _ends[MessageCount] = OffsetOf(MessageCount) + frameBytes;
            MessageCount++;
        }

        /// <summary>Return the number of messages from <see cref="SentCount"/> on that fit into a number of bytes.</summary>
        public int CountFitting(long bytes)
        {
            int first = OffsetOf(SentCount);
            if (OffsetOf(MessageCount) - first <= bytes)
                return MessageCount - SentCount;
            int found = Array.BinarySearch(_ends, SentCount, MessageCount - SentCount, (int)(first + Math.Max(bytes, 0)));
            return (found >= 0 ? found + 1 : ~found) - SentCount;
        }

        /// <summary>Return the memory to the pool. The chunk must not be used any more.</summary>
        public void Release()
        {
            ArrayPool<byte>.Shared.Return(Bytes);
            ArrayPool<int>.Shared.Return(_ends);
        }
    }
}
