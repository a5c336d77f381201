using System;
using System.Collections.Generic;
using System.Text.Json;

namespace SimpleBus.Client.Protocol
{
    /// <summary>Parsing of the JSON content of a frame.</summary>
    internal static class JsonContent
    {
        private static readonly ReadOnlyMemory<byte> EmptyObject = new[] { (byte)'{', (byte)'}' };

        /// <summary>Parse the object by <paramref name="read"/>, and return its result; empty content is {}.</summary>
        /// <exception cref="FormatException">A key is missing or has another type.</exception>
        public static T Parse<T>(ReadOnlyMemory<byte> content, Func<JsonElement, T> read)
        {
            try
            {
                using JsonDocument document = JsonDocument.Parse(content.IsEmpty ? EmptyObject : content);
                return read(document.RootElement);
            }
            catch (Exception error) when (error is JsonException || error is KeyNotFoundException
                || error is InvalidOperationException || error is FormatException)
            {
                throw new FormatException("the server sent content that does not follow the protocol", error);
            }
        }
    }
}
