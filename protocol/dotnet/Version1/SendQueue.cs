// Queue of messages to be written, as complete frames in chunks.
//
// Not thread-safe: callers hold the link's gate.
// A chunk contains complete frames only, so acks may be sent between any two chunks.
// A chunk leaves the queue when it was written. If the connection breaks, it is written again from
// its beginning on the next one: the server discards the partial frame.
//
//   publishers --> | chunk | chunk | being filled |     the first one may be taken by the writer

using System;
using System.Collections.Generic;

namespace SimpleBus.Version1
{
    internal sealed class SendQueue
    {
        private const int ChunkBytes = 64 * 1024;
        private readonly int bytesMax;
        private readonly Queue<ByteBuffer> chunks = new Queue<ByteBuffer>();
        private readonly Stack<ByteBuffer> spare = new Stack<ByteBuffer>();
        private ByteBuffer filling; // The last chunk, unless the writer has taken it.
        private int queuedBytes;

        public SendQueue(int bytesMax)
        {
            this.bytesMax = bytesMax;
        }

        public bool IsEmpty
        {
            get { return chunks.Count == 0; }
        }

        /// <summary>True if a publisher must wait. One frame may exceed the limit.</summary>
        public bool IsFull
        {
            get { return queuedBytes >= bytesMax; }
        }

        public int QueuedBytes
        {
            get { return queuedBytes; }
        }

        public void PutMessage(ushort classId, ArraySegment<byte> payload)
        {
            int size = Frames.Overhead + payload.Count;
            if (filling == null || filling.Bytes.Length - filling.Count < size)
            {
                bool common = size <= ChunkBytes;
                filling = common && spare.Count > 0
                    ? spare.Pop() : new ByteBuffer(Math.Max(ChunkBytes, size));
                chunks.Enqueue(filling);
            }
            Frames.Write(filling, Frames.Message, classId, 0, 0, payload);
            queuedBytes += size;
        }

        /// <summary>Return the next chunk to write, or null. No more frames are added to
        /// it.</summary>
        public ByteBuffer Peek()
        {
            if (chunks.Count == 0)
                return null;
            ByteBuffer first = chunks.Peek();
            if (first == filling)
                filling = null;
            return first;
        }

        /// <summary>Remove the chunk that Peek returned, after it was written.</summary>
        public void Sent()
        {
            ByteBuffer sent = chunks.Dequeue();
            queuedBytes -= sent.Count;
            sent.Count = 0;
            if (sent.Bytes.Length == ChunkBytes)
                spare.Push(sent); // At most as many as ever waited at once, which is bounded.
        }
    }
}
