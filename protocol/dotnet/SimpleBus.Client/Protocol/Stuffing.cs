using System;

namespace SimpleBus.Client.Protocol
{
    /// <summary>
    /// Byte stuffing: 3C 0D 0A is sent as 3C 0D 0A 00, so that content cannot contain the delimiter.
    /// </summary>
    internal static class Stuffing
    {
        private static ReadOnlySpan<byte> Marker => new[] { (byte)'<', (byte)'\r', (byte)'\n' };

        private static ReadOnlySpan<byte> StuffedMarker => new byte[] { (byte)'<', (byte)'\r', (byte)'\n', 0 };

        /// <summary>True if <paramref name="content"/> changes when it is stuffed.</summary>
        public static bool IsNeeded(ReadOnlySpan<byte> content) => content.IndexOf(Marker) >= 0;

        /// <summary>Append the stuffed <paramref name="content"/> to a writer.</summary>
        public static void Stuff(ReadOnlySpan<byte> content, ByteWriter writer)
        {
            int at;
            while ((at = content.IndexOf(Marker)) >= 0)
            {
                writer.Write(content.Slice(0, at));
                writer.Write(StuffedMarker);
                content = content.Slice(at + Marker.Length);
            }
            writer.Write(content);
        }

        /// <summary>Return <paramref name="content"/> without stuffing; a copy only if there is any.</summary>
        public static ReadOnlyMemory<byte> Unstuff(ReadOnlyMemory<byte> content)
        {
            ReadOnlySpan<byte> rest = content.Span;
            int at = rest.IndexOf(StuffedMarker);
            if (at < 0)
                return content;
            byte[] plain = new byte[rest.Length - 1];
            int count = 0;
            for (; at >= 0; at = rest.IndexOf(StuffedMarker))
            {
                rest.Slice(0, at + Marker.Length).CopyTo(plain.AsSpan(count));
                count += at + Marker.Length;
                rest = rest.Slice(at + StuffedMarker.Length);
            }
            rest.CopyTo(plain.AsSpan(count));
            return plain.AsMemory(0, count + rest.Length);
        }
    }
}
