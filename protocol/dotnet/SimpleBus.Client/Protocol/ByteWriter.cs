using System;
using System.Buffers;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Growing buffer of bytes, which keeps its memory when it is cleared.</summary>
    internal sealed class ByteWriter : IBufferWriter<byte>
    {
        // A longer buffer is released when it is cleared, so that one long message does not use memory for ever.
        private const int KeptBytesMax = 1 << 20;

        private byte[] _bytes = new byte[512];

        public int Count { get; private set; }

        public ReadOnlySpan<byte> WrittenSpan => _bytes.AsSpan(0, Count);

        public ReadOnlyMemory<byte> WrittenMemory => _bytes.AsMemory(0, Count);

        public void Clear()
        {
            Count = 0;
            if (_bytes.Length > KeptBytesMax)
                _bytes = new byte[512];
        }

        public void Advance(int count)
        {
            if (count < 0 || count > _bytes.Length - Count)
                throw new ArgumentOutOfRangeException(nameof(count));
            Count += count;
        }

        public Memory<byte> GetMemory(int sizeHint = 0)
        {
            Reserve(sizeHint);
            return _bytes.AsMemory(Count);
        }

        public Span<byte> GetSpan(int sizeHint = 0)
        {
            Reserve(sizeHint);
            return _bytes.AsSpan(Count);
        }

        public void Write(ReadOnlySpan<byte> bytes)
        {
            bytes.CopyTo(GetSpan(bytes.Length));
            Count += bytes.Length;
        }

        private void Reserve(int sizeHint)
        {
            int needed = Math.Max(sizeHint, 1);
            if (_bytes.Length - Count < needed)
                Array.Resize(ref _bytes, Math.Max(2 * _bytes.Length, checked(Count + needed)));
        }
    }
}
