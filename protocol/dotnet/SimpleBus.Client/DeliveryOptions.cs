using System;
using System.Collections.Generic;

namespace SimpleBus.Client
{
    /// <summary>Treatment of a subscription that falls behind.</summary>
    public enum SlowPolicy
    {
        /// <summary>Messages wait; when the class is full, its publishers wait.</summary>
        Block,

        /// <summary>The subscription loses its oldest messages.</summary>
        DropOldest,

        /// <summary>The subscription loses its newest messages.</summary>
        DropNewest,

        /// <summary>The subscription ends.</summary>
        Disconnect,
    }

    /// <summary>Less common settings of a subscription. Null values are the defaults of the class.</summary>
    public sealed class DeliveryOptions
    {
        /// <summary>Maximum number of unacknowledged messages at this client.</summary>
        public int? MaxInFlight { get; set; }

        /// <summary>Time without an acknowledgement after which a message is redelivered.</summary>
        public TimeSpan? AckTimeout { get; set; }

        /// <summary>Deliveries of a message before it becomes a dead letter. Zero for no limit.</summary>
        public int? MaxDeliveries { get; set; }

        /// <summary>Delays before the second delivery of a rejected message, the third and so on; the last one
        /// repeats.</summary>
        public IReadOnlyList<TimeSpan>? Backoff { get; set; }

        /// <summary>Time after which the server removes a durable that no subscription uses.</summary>
        public TimeSpan? DurableLifetime { get; set; }

        /// <summary>Number of unacknowledged messages above which <see cref="Slow"/> applies.</summary>
        public long? MaxPending { get; set; }

        /// <summary>Treatment of messages above <see cref="MaxPending"/>.</summary>
        public SlowPolicy Slow { get; set; }
    }
}
