using System;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Conversion of values to payloads: bytes as they are, other types by the serializer.</summary>
    internal static class PayloadCodec
    {
        public static void Write<T>(IBusSerializer serializer, ByteWriter writer, T value)
        {
            if (TryGetBytes(value, out ReadOnlyMemory<byte> bytes))
                writer.Write(bytes.Span);
            else
                serializer.Serialize(writer, value);
        }

        /// <summary>Return the payload if it needs no conversion.</summary>
        public static bool TryGetBytes<T>(T value, out ReadOnlyMemory<byte> bytes)
        {
            if (typeof(T) == typeof(ReadOnlyMemory<byte>))
            {
                bytes = (ReadOnlyMemory<byte>)(object)value!;
                return true;
            }
            if (typeof(T) == typeof(Memory<byte>))
            {
                bytes = (Memory<byte>)(object)value!;
                return true;
            }
            if (typeof(T) == typeof(byte[]))
            {
                bytes = (byte[])(object)value!;
                return true;
            }
            bytes = default;
            return false;
        }

        public static T Read<T>(IBusSerializer serializer, ReadOnlyMemory<byte> payload)
        {
            if (typeof(T) == typeof(ReadOnlyMemory<byte>))
                return (T)(object)payload;
            if (typeof(T) == typeof(Memory<byte>))
                return (T)(object)new Memory<byte>(payload.ToArray());
            if (typeof(T) == typeof(byte[]))
                return (T)(object)payload.ToArray();
            return serializer.Deserialize<T>(payload);
        }
    }
}
