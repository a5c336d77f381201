using System;
using System.Collections.Generic;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client
{
    /// <summary>Metadata of a published message.</summary>
    public sealed class PublishOptions
    {
        /// <summary>Channel, such as <c>orders.eu</c>, which subscriptions select by patterns. Null for none.</summary>
        public string? Channel { get; set; }

        /// <summary>Key: a group with <c>byKey</c> processes messages with equal keys one after the other.</summary>
        public ReadOnlyMemory<byte> Key { get; set; }

        /// <summary>Headers, in order; names may repeat.</summary>
        public IList<KeyValuePair<string, string>> Headers { get; } = new List<KeyValuePair<string, string>>();

        /// <summary>Time after which the message is not delivered any more. Null for never.</summary>
        public TimeSpan? Expires { get; set; }

        /// <summary>Time to wait before the message is delivered.</summary>
        public TimeSpan? Delay { get; set; }

        /// <summary>Time of the event, for subscribers; unused by the server.</summary>
        public DateTimeOffset? PublishedAt { get; set; }

        internal Envelope ToEnvelope()
        {
            Envelope envelope = new Envelope
            {
                Channel = Channel ?? "",
                Key = Key,
                ExpiresMilliseconds = ToMilliseconds(Expires, nameof(Expires)),
                NotBeforeMilliseconds = ToMilliseconds(Delay, nameof(Delay)),
                PublishedMicroseconds = (PublishedAt - DateTimeOffset.UnixEpoch)?.Ticks / 10,
            };
            if (Headers.Count > 0)
                envelope.Headers = new List<KeyValuePair<string, string>>(Headers);
            return envelope;
        }

        private static ulong? ToMilliseconds(TimeSpan? time, string name)
        {
            if (time < TimeSpan.Zero)
                throw new ArgumentOutOfRangeException(name, time, "a time must not be negative");
            // Rounded up, because zero means at once.
            return time == null ? (ulong?)null : (ulong)Math.Ceiling(time.Value.TotalMilliseconds);
        }
    }
}
