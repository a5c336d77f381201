using System;
using System.Buffers;

namespace SimpleBus.Client
{
    /// <summary>
    /// Converts values to payloads and back, for example with protobuf or MessagePack. Implementations must allow
    /// concurrent calls.
    /// </summary>
    public interface IBusSerializer
    {
        /// <summary>Write the payload of a value.</summary>
        /// <param name="writer">Receives the payload.</param>
        /// <param name="value">Value to write.</param>
        /// <typeparam name="T">Type of the value.</typeparam>
        void Serialize<T>(IBufferWriter<byte> writer, T value);

        /// <summary>Read the value of a payload.</summary>
        /// <param name="payload">Received payload, valid during the call.</param>
        /// <typeparam name="T">Type of the value.</typeparam>
        /// <returns>The value.</returns>
        T Deserialize<T>(ReadOnlyMemory<byte> payload);
    }
}
