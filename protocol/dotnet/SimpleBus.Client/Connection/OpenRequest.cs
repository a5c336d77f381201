using System;
using System.Threading.Tasks;

namespace SimpleBus.Client.Connection
{
    /// <summary>Request that waits for its reply. It is sent again on the next connection.</summary>
    internal sealed class OpenRequest
    {
        private readonly TaskCompletionSource<ReadOnlyMemory<byte>> _reply =
            new TaskCompletionSource<ReadOnlyMemory<byte>>(TaskCreationOptions.RunContinuationsAsynchronously);

        public OpenRequest(uint number, byte type, byte[] content)
        {
            Number = number;
            Type = type;
            Content = content;
        }

        public uint Number { get; }

        public byte Type { get; }

        public byte[] Content { get; }

        /// <summary>Content of the reply.</summary>
        public Task<ReadOnlyMemory<byte>> Reply => _reply.Task;

        public void SetReply(ReadOnlyMemory<byte> content) => _reply.TrySetResult(content);

        public void SetException(Exception error)
        {
            _reply.TrySetException(error);
            _ = _reply.Task.Exception; // A caller that was cancelled does not observe it.
        }
    }
}
