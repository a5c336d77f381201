using System;
using System.Collections.Generic;
using System.Text.Json;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Content of Connect requests.</summary>
    internal sealed class ConnectRequest
    {
        public string? Name { get; set; }
        public string? Instance { get; set; }
        public string Client { get; set; } = "";
        public double HeartbeatSeconds { get; set; }
        public string? User { get; set; }
        public string? Password { get; set; }
        public string? Token { get; set; }

        /// <summary>Lowest message number without a Confirm; null on the first connection.</summary>
        public uint? Unconfirmed { get; set; }

        /// <summary>Bus of the previous connection; null on the first one.</summary>
        public string? Bus { get; set; }

        public void Write(ByteWriter writer, IEnumerable<ClassReference> classes)
        {
            using Utf8JsonWriter json = new Utf8JsonWriter(writer);
            json.WriteStartObject();
            json.WriteNumber("version", 2);
            json.WriteString("name", Name);
            json.WriteString("instance", Instance);
            json.WriteString("client", Client);
            json.WriteNumber("heartbeat", HeartbeatSeconds);
            WriteClasses(json, classes);
            if (Unconfirmed.HasValue)
                json.WriteNumber("unconfirmed", Unconfirmed.Value);
            if (Bus != null)
                json.WriteString("bus", Bus);
            if (User != null || Password != null || Token != null)
            {
                json.WriteStartObject("auth");
                if (User != null)
                    json.WriteString("user", User);
                if (Password != null)
                    json.WriteString("password", Password);
                if (Token != null)
                    json.WriteString("token", Token);
                json.WriteEndObject();
            }
            json.WriteEndObject();
        }

        /// <summary>Write a later Connect, which only names classes.</summary>
        public static void WriteClasses(ByteWriter writer, IEnumerable<ClassReference> classes)
        {
            using Utf8JsonWriter json = new Utf8JsonWriter(writer);
            json.WriteStartObject();
            WriteClasses(json, classes);
            json.WriteEndObject();
        }

        private static void WriteClasses(Utf8JsonWriter json, IEnumerable<ClassReference> classes)
        {
            json.WriteStartArray("classes");
            foreach (ClassReference named in classes)
            {
                if (named.Name == null)
                {
                    json.WriteNumberValue(named.Id!.Value);
                    continue;
                }
                json.WriteStartObject();
                if (named.Id.HasValue)
                    json.WriteNumber("id", named.Id.Value);
                json.WriteString("name", named.Name);
                json.WriteEndObject();
            }
            json.WriteEndArray();
        }
    }

    /// <summary>Content of the reply to a Connect.</summary>
    internal sealed class ConnectReply
    {
        public long Session { get; private set; }
        public string Bus { get; private set; } = "";
        public string Run { get; private set; } = "";
        public uint Next { get; private set; }
        public long CreditBytes { get; private set; }
        public double HeartbeatSeconds { get; private set; }
        public int FrameBytes { get; private set; }
        public Durability Level { get; private set; }
        public long LostCount { get; private set; }
        public string ReplyPrefix { get; private set; } = "";
        public Dictionary<string, ushort> Classes { get; } = new Dictionary<string, ushort>();

        /// <exception cref="FormatException">The content does not follow the protocol.</exception>
        public static ConnectReply Parse(ReadOnlyMemory<byte> content) =>
            JsonContent.Parse(content, json =>
            {
                ConnectReply reply = new ConnectReply
                {
                    Session = json.GetProperty("session").GetInt64(),
                    Bus = json.GetProperty("bus").GetString() ?? "",
                    Run = json.GetProperty("run").GetString() ?? "",
                    Next = json.GetProperty("next").GetUInt32() & Frame.IdMask,
                    CreditBytes = json.GetProperty("credit").GetInt64(),
                    HeartbeatSeconds = json.GetProperty("heartbeat").GetDouble(),
                    FrameBytes = json.GetProperty("frame_bytes").GetInt32(),
                    Level = (Durability)Math.Min(
                        json.GetProperty("level").GetInt32(), (int)Durability.Disk),
                    LostCount = json.GetProperty("lost").GetInt64(),
                    ReplyPrefix = json.GetProperty("replies").GetString() ?? "",
                };
                foreach (JsonProperty named in json.GetProperty("classes").EnumerateObject())
                    reply.Classes[named.Name] = named.Value.GetUInt16();
                return reply;
            });
    }
}
