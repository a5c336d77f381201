// The part of the protobuf wire format that messages of numbers and strings need.
//
// Without reflection or a schema: a message type encodes and decodes its fields in two methods.
// As in protobuf, zero or empty fields are not written, missing fields are zero or empty, and
// unknown fields are skipped.
//
//   field = varint(number << 3 | kind)  value       kind 0: varint   2: length and bytes
//                                                        1: 8 bytes  5: 4 bytes

using System;
using System.IO;
using System.Text;

namespace SimpleBus.Version1
{
    /// <summary>Writes the fields of one message, in any order.</summary>
    public sealed class ProtobufWriter
    {
        private readonly ByteBuffer buffer = new ByteBuffer(64);

        public ProtobufWriter Int64(int field, long value)
        {
            if (value != 0)
            {
                Varint((ulong)field << 3);
                Varint((ulong)value); // Negative numbers take ten bytes.
            }
            return this;
        }

        public ProtobufWriter String(int field, string value)
        {
            if (!string.IsNullOrEmpty(value))
            {
                int count = Encoding.UTF8.GetByteCount(value);
                Varint((ulong)field << 3 | 2);
                Varint((ulong)count);
                byte[] bytes = buffer.Reserve(count);
                buffer.Count += Encoding.UTF8.GetBytes(value, 0, value.Length, bytes, buffer.Count);
            }
            return this;
        }

        public byte[] ToArray()
        {
            byte[] message = new byte[buffer.Count];
            Buffer.BlockCopy(buffer.Bytes, 0, message, 0, message.Length);
            return message;
        }

        private void Varint(ulong value)
        {
            byte[] bytes = buffer.Reserve(10);
            while (value >= 0x80)
            {
                bytes[buffer.Count++] = (byte)(value | 0x80);
                value >>= 7;
            }
            bytes[buffer.Count++] = (byte)value;
        }
    }

    /// <summary>Reads the fields of one message. InvalidDataException for invalid bytes.
    ///
    ///     while (reader.Next())
    ///         if (reader.Field == 1) number = reader.Int64();
    ///         else if (reader.Field == 2) text = reader.String();
    ///         else reader.Skip();</summary>
    public sealed class ProtobufReader
    {
        private readonly byte[] bytes;
        private readonly int end;
        private int at;
        private int kind;

        public ProtobufReader(ArraySegment<byte> message)
        {
            bytes = message.Array;
            at = message.Offset;
            end = message.Offset + message.Count;
        }

        /// <summary>Number of the current field.</summary>
        public int Field { get; private set; }

        /// <summary>Advance to the next field. False at the end. Its value must be read or
        /// skipped.</summary>
        public bool Next()
        {
            if (at == end)
                return false;
            ulong tag = Varint();
            if (tag >> 3 == 0 || tag >> 3 > int.MaxValue >> 2)
                throw new InvalidDataException("a protobuf field has the invalid number " + (tag >> 3));
            Field = (int)(tag >> 3);
            kind = (int)(tag & 7);
            return true;
        }

        public long Int64()
        {
            Expect(0);
            return (long)Varint();
        }

        public string String()
        {
            Expect(2);
            int count = Take(Varint());
            return Encoding.UTF8.GetString(bytes, at - count, count);
        }

        public void Skip()
        {
            switch (kind)
            {
                case 0: Varint(); break;
                case 1: Take(8); break;
                case 2: Take(Varint()); break;
                case 5: Take(4); break;
                default: throw new InvalidDataException("a protobuf field has the unknown wire type " + kind);
            }
        }

        private void Expect(int expected)
        {
            if (kind != expected)
                throw new InvalidDataException(
                    "protobuf field " + Field + " has wire type " + kind + "; expected " + expected);
        }

        /// <summary>Skip a number of bytes.</summary>
        private int Take(ulong count)
        {
            if (count > (ulong)(end - at))
                throw new InvalidDataException("a protobuf field ends after the end of its message");
            at += (int)count;
            return (int)count;
        }

        private ulong Varint()
        {
            ulong value = 0;
            for (int shift = 0; shift < 70; shift += 7)
            {
                if (at == end)
                    throw new InvalidDataException("a protobuf number ends after the end of its message");
                byte next = bytes[at++];
                value |= (ulong)(next & 0x7F) << shift;
                if (next < 0x80)
                    return value;
            }
            throw new InvalidDataException("a protobuf number has more than ten bytes");
        }
    }
}
