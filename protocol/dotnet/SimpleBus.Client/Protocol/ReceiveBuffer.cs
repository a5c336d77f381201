using System;

namespace SimpleBus.Client.Protocol
{
    /// <summary>
    /// Bytes received from a server, and the frames in them.
    /// <para>Invariant: 0 &lt;= start &lt;= searched &lt;= end &lt;= length, unless searched is left behind by start;
    /// no delimiter of the frame at start begins before searched.</para>
    /// </summary>
    internal sealed class ReceiveBuffer
    {
        private const int FirstBytes = 128 * 1024;

        private byte[] _bytes = new byte[FirstBytes];
        private int _start;
        private int _searched;
        private int _end;

        /// <summary>The bytes that the offsets of a <see cref="Frame"/> refer to.</summary>
        public byte[] Bytes => _bytes;

        /// <summary>Number of bytes of an incomplete frame.</summary>
        public int IncompleteBytes => _end - _start;

        /// <summary>Return space for received bytes. Frames that were read before become invalid.</summary>
        public Memory<byte> GetSpace()
        {
            if (_start > 0)
            {
                Buffer.BlockCopy(_bytes, _start, _bytes, 0, _end - _start);
                _end -= _start;
                _searched = Math.Max(0, _searched - _start);
                _start = 0;
            }
            if (_end == _bytes.Length)
                Array.Resize(ref _bytes, checked(2 * _bytes.Length));
            return _bytes.AsMemory(_end);
        }

        /// <summary>Add bytes that were written to that space.</summary>
        public void Advance(int count) => _end += count;

        /// <summary>Read the next complete frame, if there is one.</summary>
        public bool TryReadFrame(out Frame frame)
        {
            int from = Math.Max(_start + Frame.HeaderBytes, _searched);
            int distance = from < _end ? _bytes.AsSpan(from, _end - from).IndexOf(Frame.Delimiter) : -1;
            if (distance < 0)
            {
                // The end may contain the beginning of a delimiter.
                _searched = Math.Max(from, _end - Frame.DelimiterBytes + 1);
                frame = default;
                return false;
            }
            int content = _start + Frame.HeaderBytes;
            int delimiter = from + distance;
            frame = new Frame(_bytes.AsSpan(_start), content, delimiter - content);
            _start = _searched = delimiter + Frame.DelimiterBytes;
            return true;
        }
    }
}
