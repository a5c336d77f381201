using System;
using System.Text.Json;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Content of an Error frame.</summary>
    internal sealed class ErrorReply
    {
        public string Code { get; private set; } = "";
        public string Message { get; private set; } = "";
        public bool IsFatal { get; private set; }

        /// <summary>Number of refused messages.</summary>
        public int Count { get; private set; }

        /// <exception cref="FormatException">The content does not follow the protocol.</exception>
        public static ErrorReply Parse(ReadOnlyMemory<byte> content) =>
            JsonContent.Parse(content, json => new ErrorReply
            {
                Code = json.GetProperty("code").GetString() ?? "",
                Message = json.GetProperty("message").GetString() ?? "",
                IsFatal = json.TryGetProperty("fatal", out JsonElement fatal) && fatal.GetBoolean(),
                Count = json.TryGetProperty("count", out JsonElement count) ? count.GetInt32() : 0,
            });
    }
}
