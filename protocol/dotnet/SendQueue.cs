// Messages that wait to be written, as whole frames in chunks.
//
// Rule 1: not for several threads at once: whoever calls holds the link's lock.
// Rule 2: a chunk holds whole frames only, so that acks may go between any two chunks.
// Rule 3: a chunk leaves the queue when it was written. One whose connection broke is written again
//         on the next one, from its beginning: a server discards half a frame.
//
//   publishers --> | chunk | chunk | being filled |     the first one may be taken by the writer

using System;
using System.Collections.Generic;

namespace SimpleBus
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

        /// <summary>Whether a publisher has to wait. One frame may go over the limit, not
        /// more.</summary>
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

        /// <summary>The next chunk to write, or null. From now on nothing is added to it.</summary>
        public ByteBuffer Peek()
        {
            if (chunks.Count == 0)
                return null;
            ByteBuffer first = chunks.Peek();
            if (first == filling)
                filling = null;
            return first;
        }

        /// <summary>The chunk that Peek showed was written.</summary>
        public void Sent()
        {
            ByteBuffer sent = chunks.Dequeue();
            queuedBytes -= sent.Count;
            sent.Count = 0;
            if (sent.Bytes.Length == ChunkBytes)
                spare.Push(sent); // As many as ever waited at once, which is bounded.
        }
    }
}
