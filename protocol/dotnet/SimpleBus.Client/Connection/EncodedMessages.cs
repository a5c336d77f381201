using System;
using System.Collections.Generic;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>Encoded messages that wait to be queued, without their frames.</summary>
    internal sealed class EncodedMessages
    {
        private readonly ByteWriter _contents = new ByteWriter();
        private readonly ByteWriter _scratch = new ByteWriter();
        private readonly List<(byte Type, int End)> _messages = new List<(byte, int)>();

        public int Count => _messages.Count;

        public int ContentBytes => _contents.Count;

        public byte TypeOf(int index) => _messages[index].Type;

        public ReadOnlySpan<byte> ContentOf(int index)
        {
            int begin = index == 0 ? 0 : _messages[index - 1].End;
            return _contents.WrittenSpan.Slice(begin, _messages[index].End - begin);
        }

        public void Clear()
        {
            _contents.Clear();
            _messages.Clear();
        }

        /// <summary>Add a message: as a plain Message if that suffices, else as an Envelope.</summary>
        public void Add<T>(IBusSerializer serializer, T value, Envelope? envelope)
        {
            _scratch.Clear();
            if (envelope == null)
            {
                if (!PayloadCodec.TryGetBytes(value, out ReadOnlyMemory<byte> payload))
                {
                    serializer.Serialize(_scratch, value);
                    payload = _scratch.WrittenMemory;
                }
                if (payload.Span.IndexOf(Frame.Delimiter) < 0)
                {
                    _contents.Write(payload.Span);
                    _messages.Add((FrameType.Message, _contents.Count));
                    return;
                }
                _scratch.Clear();
            }
            (envelope ?? Envelope.Empty).WriteFields(_scratch);
            PayloadCodec.Write(serializer, _scratch, value);
            Stuffing.Stuff(_scratch.WrittenSpan, _contents);
            _messages.Add((FrameType.Envelope, _contents.Count));
        }
    }
}
