using System;
using System.Buffers;
using System.Text.Json;

namespace SimpleBus.Client
{
    /// <summary>Serializer that writes JSON by System.Text.Json.</summary>
    public sealed class JsonBusSerializer : IBusSerializer
    {
        private readonly JsonSerializerOptions? _options;

        /// <summary>Create a serializer.</summary>
        /// <param name="options">Options of System.Text.Json; null for its defaults.</param>
        public JsonBusSerializer(JsonSerializerOptions? options = null)
        {
            _options = options;
        }

        /// <inheritdoc/>
        public void Serialize<T>(IBufferWriter<byte> writer, T value)
        {
            using Utf8JsonWriter json = new Utf8JsonWriter(writer);
            JsonSerializer.Serialize(json, value, _options);
        }

        /// <inheritdoc/>
        public T Deserialize<T>(ReadOnlyMemory<byte> payload) =>
            JsonSerializer.Deserialize<T>(payload.Span, _options)!;
    }
}
