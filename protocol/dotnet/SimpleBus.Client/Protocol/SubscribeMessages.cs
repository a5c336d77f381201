using System;
using System.Collections.Generic;
using System.Text.Json;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Content of Subscribe requests.</summary>
    internal sealed class SubscribeRequest
    {
        private static readonly string[] SlowKeywords = { "block", "drop_oldest", "drop_newest", "disconnect" };

        public IReadOnlyList<string> Channels { get; set; } = Array.Empty<string>();
        public string? Durable { get; set; }
        public string? Group { get; set; }
        public bool ByKey { get; set; }
        public StartPosition Start { get; set; } = StartPosition.Waiting;
        public DeliveryOptions Delivery { get; set; } = new DeliveryOptions();

        /// <summary>True if the server keeps the position when the connection is lost.</summary>
        public bool HasKeptPosition => Durable != null || Group != null;

        /// <param name="writer">Receives the content.</param>
        /// <param name="continueAt">Sequence to continue at instead of the start position; null for none.</param>
        public void Write(ByteWriter writer, long? continueAt)
        {
            using Utf8JsonWriter json = new Utf8JsonWriter(writer);
            json.WriteStartObject();
            if (Channels.Count > 0)
            {
                json.WriteStartArray("channels");
                foreach (string channel in Channels)
                    json.WriteStringValue(channel);
                json.WriteEndArray();
            }
            if (Durable != null)
                json.WriteString("durable", Durable);
            if (Group != null)
                json.WriteString("group", Group);
            if (ByKey)
                json.WriteBoolean("by_key", true);
            WriteStart(json, continueAt);
            WriteDelivery(json);
            json.WriteEndObject();
        }

        private void WriteStart(Utf8JsonWriter json, long? continueAt)
        {
            long? sequence = continueAt ?? Start.Sequence;
            if (sequence.HasValue)
            {
                json.WriteStartObject("start");
                json.WriteNumber("sequence", sequence.Value);
                json.WriteEndObject();
            }
            else if (Start.Time.HasValue)
            {
                json.WriteStartObject("start");
                json.WriteNumber("time", (Start.Time.Value - DateTimeOffset.UnixEpoch).TotalSeconds);
                json.WriteEndObject();
            }
            else
            {
                json.WriteString("start", Start.Keyword);
            }
        }

        private void WriteDelivery(Utf8JsonWriter json)
        {
            if (Delivery.DurableLifetime.HasValue)
                json.WriteNumber("idle_seconds", Delivery.DurableLifetime.Value.TotalSeconds);
            if (Delivery.MaxInFlight.HasValue)
                json.WriteNumber("max_in_flight", Delivery.MaxInFlight.Value);
            if (Delivery.MaxPending.HasValue)
                json.WriteNumber("max_pending", Delivery.MaxPending.Value);
            if (Delivery.Slow != SlowPolicy.Block)
                json.WriteString("slow", SlowKeywords[(int)Delivery.Slow]);
            if (Delivery.AckTimeout.HasValue)
                json.WriteNumber("ack_seconds", Delivery.AckTimeout.Value.TotalSeconds);
            if (Delivery.MaxDeliveries.HasValue)
                json.WriteNumber("max_deliveries", Delivery.MaxDeliveries.Value);
            if (Delivery.Backoff != null)
            {
                json.WriteStartArray("backoff");
                foreach (TimeSpan delay in Delivery.Backoff)
                    json.WriteNumberValue(delay.TotalSeconds);
                json.WriteEndArray();
            }
        }
    }

    /// <summary>Content of the reply to a Subscribe.</summary>
    internal readonly struct SubscribeReply
    {
        private SubscribeReply(long cursor, bool isResumed)
        {
            Cursor = cursor;
            IsResumed = isResumed;
        }

        /// <summary>Next sequence that the position sends for the first time.</summary>
        public long Cursor { get; }

        /// <summary>True if the durable or group existed.</summary>
        public bool IsResumed { get; }

        /// <exception cref="FormatException">The content does not follow the protocol.</exception>
        public static SubscribeReply Parse(ReadOnlyMemory<byte> content) =>
            JsonContent.Parse(content, json => new SubscribeReply(
                json.GetProperty("cursor").GetInt64(), json.GetProperty("resumed").GetBoolean()));
    }
}
