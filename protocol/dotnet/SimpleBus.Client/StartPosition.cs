using System;

namespace SimpleBus.Client
{
    /// <summary>First message of a new subscription. A durable or a group that exists continues where it is.</summary>
    public sealed class StartPosition
    {
        private StartPosition(string keyword)
        {
            Keyword = keyword;
        }

        /// <summary>Messages that no subscription has received yet if this is the first one of the class, otherwise
        /// new messages. The default.</summary>
        public static StartPosition Waiting { get; } = new StartPosition("waiting");

        /// <summary>New messages.</summary>
        public static StartPosition New { get; } = new StartPosition("new");

        /// <summary>The oldest stored message.</summary>
        public static StartPosition Earliest { get; } = new StartPosition("earliest");

        /// <summary>The newest stored message.</summary>
        public static StartPosition Last { get; } = new StartPosition("last");

        /// <summary>The last message of each channel, then new messages.</summary>
        public static StartPosition LastValues { get; } = new StartPosition("last_values");

        internal string Keyword { get; }

        internal long? Sequence { get; private set; }

        internal DateTimeOffset? Time { get; private set; }

        /// <summary>The message with this sequence, or the next stored one.</summary>
        /// <param name="sequence">Sequence, from <see cref="Message{T}.Sequence"/>.</param>
        /// <returns>The start position.</returns>
        public static StartPosition FromSequence(long sequence)
        {
            if (sequence < 0)
                throw new ArgumentOutOfRangeException(nameof(sequence), sequence, "a sequence is not negative");
            return new StartPosition("") { Sequence = sequence };
        }

        /// <summary>The first message accepted at or after a time.</summary>
        /// <param name="time">Time by the clock of the server.</param>
        /// <returns>The start position.</returns>
        public static StartPosition FromTime(DateTimeOffset time) => new StartPosition("") { Time = time };
    }
}
