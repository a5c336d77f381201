// Frames: encoding, and finding them in received bytes. Bytes in, bytes out: no socket, thread or
// clock.
//
// The search for a delimiter begins after the header, at offset 9, never earlier.
// A frame that was found is in the reader's buffer and valid until the next read.
//
//   offset  0      1          3            7             9           n-4             n
//           | type | class id | message id | timer index | content … | 3C 0D 0A 3E   |

using System;
using System.IO;

namespace SimpleBus.Version1
{
    /// <summary>Constants of the wire format, and encoding.</summary>
    public static class Frames
    {
        public const byte Heartbeat = (byte)'0';
        public const byte Message = (byte)'1';
        public const byte Subscribe = (byte)'2';
        public const byte Ack = (byte)'3';
        public const byte Connect = (byte)'4';

        public const int HeaderBytes = 9;
        public const int DelimiterBytes = 4;
        /// <summary>Bytes that a frame adds to its content.</summary>
        public const int Overhead = HeaderBytes + DelimiterBytes;
        /// <summary>Number of message ids: after the highest id, ids restart at
        /// 0.</summary>
        public const uint IdCount = 1u << 31;

        /// <summary>Append one frame. The caller checks that its content may be sent.</summary>
        public static void Write(
            ByteBuffer to, byte type, ushort classId, uint messageId, ushort timerIndex,
            ArraySegment<byte> content)
        {
            byte[] bytes = to.Reserve(Overhead + content.Count);
            int at = to.Count;
            bytes[at] = type;
            bytes[at + 1] = (byte)(classId >> 8);
            bytes[at + 2] = (byte)classId;
            bytes[at + 3] = (byte)(messageId >> 24);
            bytes[at + 4] = (byte)(messageId >> 16);
            bytes[at + 5] = (byte)(messageId >> 8);
            bytes[at + 6] = (byte)messageId;
            bytes[at + 7] = (byte)(timerIndex >> 8);
            bytes[at + 8] = (byte)timerIndex;
            at += HeaderBytes;
            if (content.Count > 0)
                Buffer.BlockCopy(content.Array, content.Offset, bytes, at, content.Count);
            at += content.Count;
            bytes[at] = (byte)'<';
            bytes[at + 1] = (byte)'\r';
            bytes[at + 2] = (byte)'\n';
            bytes[at + 3] = (byte)'>';
            to.Count = at + DelimiterBytes;
        }

        /// <summary>Return the offset of the first delimiter at or after `from` that ends before
        /// `end`; -1 without one.</summary>
        public static int FindDelimiter(byte[] bytes, int from, int end)
        {
            int starts = end - DelimiterBytes + 1; // First offset at which no delimiter fits.
            while (from < starts)
            {
                int at = Array.IndexOf(bytes, (byte)'<', from, starts - from);
                if (at < 0)
                    break;
                if (bytes[at + 1] == '\r' && bytes[at + 2] == '\n' && bytes[at + 3] == '>')
                    return at;
                from = at + 1;
            }
            return -1;
        }
    }

    /// <summary>One frame. Its content is in the reader's buffer.</summary>
    public struct Frame
    {
        public byte Type;
        public ushort ClassId;
        public uint MessageId;
        public ushort TimerIndex;
        public ArraySegment<byte> Content;
    }

    /// <summary>Growing buffer of bytes.</summary>
    public sealed class ByteBuffer
    {
        public ByteBuffer(int capacity)
        {
            Bytes = new byte[capacity];
        }

        public byte[] Bytes { get; private set; }

        /// <summary>Number of valid bytes.</summary>
        public int Count { get; set; }

        /// <summary>Reserve space after the first `Count` bytes. Returns the array.</summary>
        public byte[] Reserve(int more)
        {
            if (Bytes.Length - Count < more)
            {
                byte[] grown = Bytes;
                Array.Resize(ref grown, Math.Max(2 * Bytes.Length, Count + more));
                Bytes = grown;
            }
            return Bytes;
        }
    }

    /// <summary>Finds frames in the bytes of a socket, in one buffer.
    ///
    /// Invariant: 0 &lt;= start &lt;= end &lt;= buffer.Length; no delimiter of the frame at `start`
    /// begins before `searched`.</summary>
    public sealed class FrameReader
    {
        private const int FirstBytes = 256 * 1024;
        private readonly int frameBytesMax;
        private byte[] buffer;
        private int start;
        private int searched;
        private int end;

        public FrameReader(int frameBytesMax)
        {
            this.frameBytesMax = frameBytesMax;
            buffer = new byte[Math.Max(Math.Min(FirstBytes, frameBytesMax), Frames.Overhead)];
        }

        /// <summary>Number of bytes of an incomplete frame.</summary>
        public int Leftover
        {
            get { return end - start; }
        }

        /// <summary>Discard all bytes, for a new connection.</summary>
        public void Reset()
        {
            start = searched = end = 0;
        }

        /// <summary>Return space for the next bytes; never empty. Invalidates frames found
        /// before.</summary>
        public ArraySegment<byte> Space()
        {
            if (start > 0)
            {
                // The remaining bytes are part of one frame, so few bytes are moved.
                Buffer.BlockCopy(buffer, start, buffer, 0, end - start);
                end -= start;
                searched -= start;
                start = 0;
            }
            if (end == buffer.Length)
                Array.Resize(ref buffer, 2 * buffer.Length);
            return new ArraySegment<byte>(buffer, end, buffer.Length - end);
        }

        /// <summary>Add bytes that were written to that space.</summary>
        public void Fill(int count)
        {
            end += count;
        }

        /// <summary>Return the next complete frame, if there is one. InvalidDataException if it is
        /// too long.</summary>
        public bool Next(out Frame frame)
        {
            frame = default(Frame);
            int from = Math.Max(start + Frames.HeaderBytes, searched);
            int at = Frames.FindDelimiter(buffer, from, end);
            int length = at < 0 ? end - start + 1 : at + Frames.DelimiterBytes - start;
            if (length > frameBytesMax)
                throw new InvalidDataException(
                    "received a frame longer than the limit of " + frameBytesMax + " bytes");
            if (at < 0)
            {
                // The end may contain the beginning of a delimiter: these bytes are searched again.
                searched = Math.Max(from, end - Frames.DelimiterBytes + 1);
                return false;
            }
            frame.Type = buffer[start];
            frame.ClassId = (ushort)(buffer[start + 1] << 8 | buffer[start + 2]);
            frame.MessageId = (uint)(buffer[start + 3] << 24 | buffer[start + 4] << 16
                | buffer[start + 5] << 8 | buffer[start + 6]);
            frame.TimerIndex = (ushort)(buffer[start + 7] << 8 | buffer[start + 8]);
            int content = start + Frames.HeaderBytes;
            frame.Content = new ArraySegment<byte>(buffer, content, at - content);
            start = searched = at + Frames.DelimiterBytes;
            return true;
        }
    }
}
