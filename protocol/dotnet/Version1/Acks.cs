// Processed messages that are not acknowledged yet, as the ranges of Ack frames.
//
// Only ids that follow one another in the order of processing are joined. A range never crosses the
// wrap: id 0 does not follow id 2147483647.
// Ids of different classes or timer indexes are never in one range: the original server searches
// for an ack in the tick of its timer index.
// The log belongs to one session. Ids of a lost session are discarded: after a restart, the server may
// assign them to other messages.

using System;
using System.Collections.Generic;

namespace SimpleBus.Version1
{
    /// <summary>Half-open range of message ids: First is included, Last is not.</summary>
    public struct AckRange
    {
        public uint First;
        public uint Last;
    }

    /// <summary>Processed messages that are not written as Ack frames yet.</summary>
    public sealed class AckLog
    {
        private readonly Dictionary<uint, List<AckRange>> groups =
            new Dictionary<uint, List<AckRange>>();
        private readonly List<uint> order = new List<uint>();
        private readonly byte[] digits = new byte[21]; // Two numbers of ten digits and a hyphen.
        private List<AckRange> group; // Last used group; usually the next one, too.
        private uint groupKey;

        /// <summary>Messages in the log.</summary>
        public int Count { get; private set; }

        /// <summary>Add a processed message.</summary>
        public void Add(ushort classId, ushort timerIndex, uint messageId)
        {
            uint key = (uint)classId << 16 | timerIndex;
            if (group == null || groupKey != key)
                Choose(key);
            int last = group.Count - 1;
            if (last >= 0 && group[last].Last == messageId)
                group[last] = new AckRange { First = group[last].First, Last = messageId + 1 };
            else
                group.Add(new AckRange { First = messageId, Last = messageId + 1 });
            Count++;
        }

        /// <summary>Append Ack frames for everything in the log, and empty it.</summary>
        public void Take(ByteBuffer to)
        {
            foreach (uint key in order)
            {
                foreach (AckRange range in groups[key])
                {
                    int at = Digits(range.Last, digits.Length);
                    digits[--at] = (byte)'-';
                    at = Digits(range.First, at);
                    Frames.Write(
                        to, Frames.Ack, (ushort)(key >> 16), 0, (ushort)key,
                        new ArraySegment<byte>(digits, at, digits.Length - at));
                }
            }
            Clear();
        }

        public void Clear()
        {
            // The lists are reused, because a session has few timer indexes.
            foreach (uint key in order)
                groups[key].Clear();
            order.Clear();
            group = null;
            Count = 0;
        }

        private void Choose(uint key)
        {
            if (!groups.TryGetValue(key, out group))
                groups[key] = group = new List<AckRange>();
            if (group.Count == 0)
                order.Add(key);
            groupKey = key;
        }

        /// <summary>Write a number in decimal so that it ends before `end`. Returns the offset of
        /// its first digit.</summary>
        private int Digits(uint number, int end)
        {
            do
            {
                digits[--end] = (byte)('0' + number % 10);
                number /= 10;
            }
            while (number > 0);
            return end;
        }
    }
}
