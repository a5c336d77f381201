using System;
using System.Buffers.Text;
using System.Collections.Generic;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Acks and nacks of one position that are not sent yet. Acks of consecutive messages are one range. Used under the
    /// lock of its inbox.
    /// </summary>
    internal sealed class AckBuffer
    {
        private const long IdCount = Frame.IdMask + 1L;
        private const int ErrorBytesMax = 1024;

        private readonly List<(long First, long End)> _ranges = new List<(long, long)>();
        private readonly ByteWriter _otherFrames = new ByteWriter();
        private readonly ushort _subscription;

        public AckBuffer(ushort subscription)
        {
            _subscription = subscription;
        }

        /// <summary>False if the server does not accept acks of these messages any more.</summary>
        public bool IsOpen { get; private set; } = true;

        /// <summary>Messages whose ack is not sent yet.</summary>
        public long PendingCount { get; private set; }

        public bool IsEmpty => _ranges.Count == 0 && _otherFrames.Count == 0;

        public void Ack(long first, long end)
        {
            PendingCount += end - first;
            int last = _ranges.Count - 1;
            if (last >= 0 && _ranges[last].End == first)
                _ranges[last] = (_ranges[last].First, end);
            else
                _ranges.Add((first, end));
        }

        /// <summary>Reject messages, or restart their ack timeout. The range must not cross the wrap of ids.</summary>
        /// <param name="type">Type of the frame, Nack or Working.</param>
        /// <param name="first">Sequence of the first message.</param>
        /// <param name="end">Sequence after the last message.</param>
        /// <param name="attempt">Delivery attempt that the frame concerns; 0 for any.</param>
        /// <param name="option">Delay in milliseconds or "terminate"; empty for neither.</param>
        /// <param name="error">Error text; null for none.</param>
        public void Append(byte type, long first, long end, int attempt, string option, string? error)
        {
            ByteWriter content = new ByteWriter();
            WriteRange(content, first, end);
            if (option.Length > 0)
                WriteText(content, " " + option);
            if (error != null)
            {
                WriteText(content, "\n");
                Stuffing.Stuff(EncodeError(error), content);
            }
            Frame.Append(_otherFrames, type, _subscription, (uint)attempt, 0, content.WrittenSpan);
            PendingCount++;
        }

        /// <summary>Return whether the ack of a message is pending.</summary>
        public bool Contains(long sequence)
        {
            foreach ((long first, long end) in _ranges)
                if (first <= sequence && sequence < end)
                    return true;
            return false;
        }

        /// <summary>Append the frames to a writer, and clear this buffer.</summary>
        public void WriteTo(ByteWriter writer)
        {
            ByteWriter? content = null;
            foreach ((long first, long end) in _ranges)
            {
                // A range never crosses the wrap of message ids.
                for (long from = first; from < end;)
                {
                    long to = Math.Min(end, ((from / IdCount) + 1) * IdCount);
                    content ??= new ByteWriter();
                    content.Clear();
                    WriteRange(content, from, to);
                    Frame.Append(writer, FrameType.Ack, _subscription, 0, 0, content.WrittenSpan);
                    from = to;
                }
            }
            writer.Write(_otherFrames.WrittenSpan);
            Clear();
        }

        /// <summary>Discard everything, and ignore later acknowledgements.</summary>
        public void Close()
        {
            IsOpen = false;
            Clear();
        }

        private void Clear()
        {
            _ranges.Clear();
            _otherFrames.Clear();
            PendingCount = 0;
        }

        private static void WriteRange(ByteWriter writer, long first, long end)
        {
            WriteNumber(writer, first % IdCount);
            WriteText(writer, "-");
            WriteNumber(writer, (first % IdCount) + (end - first));
        }

        private static void WriteNumber(ByteWriter writer, long number)
        {
            Utf8Formatter.TryFormat(number, writer.GetSpan(20), out int count);
            writer.Advance(count);
        }

        private static void WriteText(ByteWriter writer, string text)
        {
            foreach (char character in text)
            {
                writer.GetSpan(1)[0] = (byte)character; // ASCII only.
                writer.Advance(1);
            }
        }

        private static ReadOnlySpan<byte> EncodeError(string error)
        {
            byte[] bytes = System.Text.Encoding.UTF8.GetBytes(error);
            int length = Math.Min(bytes.Length, ErrorBytesMax);
            // Do not cut within a character.
            while (length < bytes.Length && length > 0 && (bytes[length] & 0xC0) == 0x80)
                length--;
            return bytes.AsSpan(0, length);
        }
    }
}
