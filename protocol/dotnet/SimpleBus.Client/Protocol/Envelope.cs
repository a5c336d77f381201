using System;
using System.Buffers.Binary;
using System.Collections.Generic;
using System.Text;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Metadata of a message, as in the content of an Envelope frame.</summary>
    internal sealed class Envelope
    {
        private const byte PublishedBit = 1;
        private const byte ExpiresBit = 2;
        private const byte NotBeforeBit = 4;
        private const byte ChannelBit = 8;
        private const byte KeyBit = 16;
        private const byte HeadersBit = 32;

        private static readonly UTF8Encoding Utf8 = new UTF8Encoding(false, true);

        public static readonly Envelope Empty = new Envelope();

        /// <summary>Channel; empty without one.</summary>
        public string Channel { get; set; } = "";

        public ReadOnlyMemory<byte> Key { get; set; }

        public IReadOnlyList<KeyValuePair<string, string>> Headers { get; set; } =
            Array.Empty<KeyValuePair<string, string>>();

        /// <summary>Microseconds since 1970 by the publisher's clock.</summary>
        public long? PublishedMicroseconds { get; set; }

        /// <summary>Milliseconds after acceptance.</summary>
        public ulong? ExpiresMilliseconds { get; set; }

        /// <summary>Milliseconds after acceptance.</summary>
        public ulong? NotBeforeMilliseconds { get; set; }

        /// <summary>Append the fields in front of the payload, without stuffing.</summary>
        /// <exception cref="ArgumentException">Channel, key or headers are too long, or not text.</exception>
        public void WriteFields(ByteWriter writer)
        {
            int bits = (PublishedMicroseconds.HasValue ? PublishedBit : 0)
                | (ExpiresMilliseconds.HasValue ? ExpiresBit : 0)
                | (NotBeforeMilliseconds.HasValue ? NotBeforeBit : 0)
                | (Channel.Length > 0 ? ChannelBit : 0)
                | (Key.Length > 0 ? KeyBit : 0)
                | (Headers.Count > 0 ? HeadersBit : 0);
            writer.GetSpan(1)[0] = (byte)bits;
            writer.Advance(1);
            if (PublishedMicroseconds.HasValue)
                WriteInt64(writer, PublishedMicroseconds.Value);
            if (ExpiresMilliseconds.HasValue)
                WriteInt64(writer, unchecked((long)ExpiresMilliseconds.Value));
            if (NotBeforeMilliseconds.HasValue)
                WriteInt64(writer, unchecked((long)NotBeforeMilliseconds.Value));
            if (Channel.Length > 0)
                WriteText(writer, Channel, "a channel");
            if (Key.Length > 0)
            {
                WriteLength(writer, Key.Length, "a key");
                writer.Write(Key.Span);
            }
            if (Headers.Count > 0)
                WriteHeaders(writer);
        }

        /// <summary>Decode the content of an Envelope frame.</summary>
        /// <exception cref="FormatException">The content is malformed.</exception>
        public static Envelope Decode(ReadOnlyMemory<byte> content, out ReadOnlyMemory<byte> payload)
        {
            ReadOnlyMemory<byte> rest = Stuffing.Unstuff(content);
            byte bits = ReadBytes(ref rest, 1).Span[0];
            if (bits >= 64)
                throw new FormatException("an envelope has unknown fields");
            Envelope envelope = new Envelope();
            if ((bits & PublishedBit) != 0)
                envelope.PublishedMicroseconds = ReadInt64(ref rest);
            if ((bits & ExpiresBit) != 0)
                envelope.ExpiresMilliseconds = unchecked((ulong)ReadInt64(ref rest));
            if ((bits & NotBeforeBit) != 0)
                envelope.NotBeforeMilliseconds = unchecked((ulong)ReadInt64(ref rest));
            if ((bits & ChannelBit) != 0)
            {
                envelope.Channel = ReadText(ref rest);
                if (envelope.Channel.Length == 0)
                    throw new FormatException("an envelope has an empty channel");
            }
            if ((bits & KeyBit) != 0)
                envelope.Key = ReadField(ref rest);
            if ((bits & HeadersBit) != 0)
            {
                ReadOnlyMemory<byte> encoded = ReadField(ref rest);
                List<KeyValuePair<string, string>> headers = new List<KeyValuePair<string, string>>();
                while (encoded.Length > 0)
                {
                    string name = ReadText(ref encoded);
                    headers.Add(new KeyValuePair<string, string>(name, ReadText(ref encoded)));
                }
                envelope.Headers = headers;
            }
            payload = rest;
            return envelope;
        }

        private void WriteHeaders(ByteWriter writer)
        {
            int length = 0;
            foreach (KeyValuePair<string, string> header in Headers)
                length += 4 + Utf8.GetByteCount(header.Key) + Utf8.GetByteCount(header.Value);
            WriteLength(writer, length, "all headers together");
            foreach (KeyValuePair<string, string> header in Headers)
            {
                WriteText(writer, header.Key, "a header name");
                WriteText(writer, header.Value, "a header");
            }
        }

        private static void WriteText(ByteWriter writer, string text, string what)
        {
            int length = Utf8.GetByteCount(text);
            WriteLength(writer, length, what);
            writer.Advance(Utf8.GetBytes(text.AsSpan(), writer.GetSpan(length)));
        }

        private static void WriteLength(ByteWriter writer, int length, string what)
        {
            if (length > ushort.MaxValue)
                throw new ArgumentException($"{what} of {length} bytes; expected at most {ushort.MaxValue}");
            BinaryPrimitives.WriteUInt16BigEndian(writer.GetSpan(2), (ushort)length);
            writer.Advance(2);
        }

        private static void WriteInt64(ByteWriter writer, long value)
        {
            BinaryPrimitives.WriteInt64BigEndian(writer.GetSpan(8), value);
            writer.Advance(8);
        }

        private static ReadOnlyMemory<byte> ReadBytes(ref ReadOnlyMemory<byte> rest, int count)
        {
            if (rest.Length < count)
                throw new FormatException("an envelope ends within a field");
            ReadOnlyMemory<byte> bytes = rest.Slice(0, count);
            rest = rest.Slice(count);
            return bytes;
        }

        private static long ReadInt64(ref ReadOnlyMemory<byte> rest) =>
            BinaryPrimitives.ReadInt64BigEndian(ReadBytes(ref rest, 8).Span);

        private static ReadOnlyMemory<byte> ReadField(ref ReadOnlyMemory<byte> rest) =>
            ReadBytes(ref rest, BinaryPrimitives.ReadUInt16BigEndian(ReadBytes(ref rest, 2).Span));

        private static string ReadText(ref ReadOnlyMemory<byte> rest)
        {
            try
            {
                return Utf8.GetString(ReadField(ref rest).Span);
            }
            catch (DecoderFallbackException error)
            {
                throw new FormatException("an envelope has text that is not UTF-8", error);
            }
        }
    }
}
