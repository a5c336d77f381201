using System;
using System.Buffers.Binary;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Header of a received frame, and the place of its content in the receive buffer.</summary>
    internal readonly struct Frame
    {
        public const int HeaderBytes = 9;
        public const int DelimiterBytes = 4;

        /// <summary>Bytes that a frame adds to its content.</summary>
        public const int Overhead = HeaderBytes + DelimiterBytes;

        /// <summary>Message ids and numbers are the low 31 bits of a count.</summary>
        public const uint IdMask = 0x7FFF_FFFF;

        public readonly byte Type;
        public readonly ushort A;
        public readonly uint B;
        public readonly ushort C;

        /// <summary>Offset of the content in the receive buffer.</summary>
        public readonly int ContentOffset;
        public readonly int ContentLength;

        public Frame(ReadOnlySpan<byte> header, int contentOffset, int contentLength)
        {
            Type = header[0];
            A = BinaryPrimitives.ReadUInt16BigEndian(header.Slice(1));
            B = BinaryPrimitives.ReadUInt32BigEndian(header.Slice(3));
            C = BinaryPrimitives.ReadUInt16BigEndian(header.Slice(7));
            ContentOffset = contentOffset;
            ContentLength = contentLength;
        }

        public static ReadOnlySpan<byte> Delimiter => new[] { (byte)'<', (byte)'\r', (byte)'\n', (byte)'>' };

        public bool IsMessage => Type == FrameType.Message || Type == FrameType.Envelope;

        /// <summary>Write a frame to the beginning of <paramref name="target"/> and return its length.</summary>
        public static int Write(
            Span<byte> target, byte type, ushort a, uint b, ushort c, ReadOnlySpan<byte> content)
        {
            target[0] = type;
            BinaryPrimitives.WriteUInt16BigEndian(target.Slice(1), a);
            WriteNumber(target, b);
            BinaryPrimitives.WriteUInt16BigEndian(target.Slice(7), c);
            content.CopyTo(target.Slice(HeaderBytes));
            Delimiter.CopyTo(target.Slice(HeaderBytes + content.Length));
            return Overhead + content.Length;
        }

        /// <summary>Write field B of the frame at the beginning of <paramref name="target"/>.</summary>
        public static void WriteNumber(Span<byte> target, uint b) =>
            BinaryPrimitives.WriteUInt32BigEndian(target.Slice(3), b);

        /// <summary>Append a frame to a writer.</summary>
        public static void Append(
            ByteWriter writer, byte type, ushort a, uint b, ushort c, ReadOnlySpan<byte> content)
        {
            Span<byte> target = writer.GetSpan(Overhead + content.Length);
            writer.Advance(Write(target, type, a, b, c, content));
        }
    }
}
