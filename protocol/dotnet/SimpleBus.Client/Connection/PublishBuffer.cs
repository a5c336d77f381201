using System;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Published messages until the server has confirmed them. Not thread-safe.
    /// <para>A position counts the messages of this client from 0; the message number on the wire follows from it.
    /// The reply of a reconnect contains the number that the server expects. All messages from it on are sent again,
    /// before new ones.</para>
    /// <para>Invariant: confirmed &lt;= released &lt;= published, and 0 &lt;= in flight bytes &lt;= unconfirmed bytes.</para>
    /// </summary>
    internal sealed class PublishBuffer
    {
        private PublishChunk? _first;
        private PublishChunk? _last;
        private PublishChunk? _sending;
        private long _baseNumber;
        private long _everReleasedPosition;
        private long _inFlightBytes;
        private long _creditBytes;

        /// <summary>Position of the next message.</summary>
        public long PublishedPosition { get; private set; }

        /// <summary>All messages below this position are stored or refused.</summary>
        public long ConfirmedPosition { get; private set; }

        /// <summary>All messages below this position were released for sending on this connection.</summary>
        public long ReleasedPosition { get; private set; }

        /// <summary>Bytes of the frames of unconfirmed messages.</summary>
        public long UnconfirmedBytes { get; private set; }

        /// <summary>Messages that were sent again.</summary>
        public long ResentCount { get; private set; }

        /// <summary>True if <see cref="TryRelease"/> may return messages.</summary>
        public bool CanRelease =>
            ReleasedPosition < PublishedPosition && (_inFlightBytes == 0 || _inFlightBytes < _creditBytes);

        public uint FirstUnconfirmedNumber => NumberOf(ConfirmedPosition);

        /// <summary>Add a message and return its position.</summary>
        public long Append(byte type, ushort classId, ReadOnlySpan<byte> content)
        {
            int frameBytes = Frame.Overhead + content.Length;
            if (_last == null || !_last.HasRoom(frameBytes))
                AddChunk(frameBytes);
            PublishChunk chunk = _last!;
            Frame.Write(chunk.GetSpace(), type, classId, NumberOf(PublishedPosition), 0, content);
            chunk.Add(frameBytes);
            UnconfirmedBytes += frameBytes;
            return PublishedPosition++;
        }

        /// <summary>Release the next messages that the credit allows, as one range of bytes.</summary>
        public bool TryRelease(out PublishChunk chunk, out ReadOnlyMemory<byte> bytes)
        {
            while (_sending != null && _sending.SentCount == _sending.MessageCount && _sending.Next != null)
                _sending = _sending.Next;
            chunk = _sending!;
            bytes = default;
            if (chunk == null || chunk.SentCount == chunk.MessageCount)
                return false;
            int count = chunk.CountFitting(_creditBytes - _inFlightBytes);
            if (count == 0 && _inFlightBytes > 0)
                return false;
            count = Math.Max(count, 1);
            int begin = chunk.OffsetOf(chunk.SentCount);
            int end = chunk.OffsetOf(chunk.SentCount + count);
            bytes = chunk.Bytes.AsMemory(begin, end - begin);
            chunk.SentCount += count;
            chunk.IsBeingWritten = true;
            _inFlightBytes += end - begin;
            ResentCount += Math.Max(0, Math.Min(count, _everReleasedPosition - ReleasedPosition));
            ReleasedPosition += count;
            _everReleasedPosition = Math.Max(_everReleasedPosition, ReleasedPosition);
            return true;
        }

        /// <summary>Note that the write of released messages has ended.</summary>
        public void EndWrite(PublishChunk chunk)
        {
            chunk.IsBeingWritten = false;
            ReleaseConfirmedChunks();
        }

        /// <summary>Note that all messages before a number are stored or refused.</summary>
        /// <exception cref="FormatException">The number was not sent yet.</exception>
        public void Confirm(uint number)
        {
            long count = (number - FirstUnconfirmedNumber) & Frame.IdMask;
            if (count > ReleasedPosition - ConfirmedPosition)
            {
                if (count > Frame.IdMask / 2)
                    return; // The Confirm repeats an earlier one.
                throw new FormatException($"the server confirmed number {number}, which was not sent");
            }
            ConfirmUntil(ConfirmedPosition + count);
        }

        /// <summary>Return the position of an unconfirmed message number; -1 if there is none.</summary>
        public long PositionOf(uint number)
        {
            long distance = (number - FirstUnconfirmedNumber) & Frame.IdMask;
            return distance < PublishedPosition - ConfirmedPosition ? ConfirmedPosition + distance : -1;
        }

        /// <summary>Prepare all unconfirmed messages to be sent again.</summary>
        public void ConnectionLost()
        {
            for (PublishChunk? chunk = _first; chunk != null; chunk = chunk.Next)
                chunk.SentCount = chunk.ConfirmedCount;
            _sending = _first;
            _inFlightBytes = 0;
            ReleasedPosition = ConfirmedPosition;
        }

        /// <summary>Continue on a new connection.</summary>
        /// <param name="nextNumber">Message number that the server expects.</param>
        /// <param name="creditBytes">Bytes that may be in flight.</param>
        /// <param name="isSameBus">True if the server has the stored state of the previous one.</param>
        public void Resume(uint nextNumber, long creditBytes, bool isSameBus)
        {
            _creditBytes = creditBytes;
            long count = (nextNumber - FirstUnconfirmedNumber) & Frame.IdMask;
            if (isSameBus && count <= _everReleasedPosition - ConfirmedPosition)
            {
                ReleasedPosition += count;
                for (PublishChunk? chunk = _first; chunk != null; chunk = chunk.Next)
                    chunk.SentCount = (int)Math.Max(
                        chunk.SentCount, Math.Min(chunk.MessageCount, ReleasedPosition - chunk.FirstPosition));
                _inFlightBytes = 0;
                ConfirmUntil(ReleasedPosition);
                _inFlightBytes = 0;
                return;
            }
            _baseNumber = nextNumber - ConfirmedPosition;
            _everReleasedPosition = ConfirmedPosition;
            for (PublishChunk? chunk = _first; chunk != null; chunk = chunk.Next)
                for (int index = chunk.ConfirmedCount; index < chunk.MessageCount; index++)
                    Frame.WriteNumber(
                        chunk.Bytes.AsSpan(chunk.OffsetOf(index)), NumberOf(chunk.FirstPosition + index));
        }

        private uint NumberOf(long position) => (uint)((_baseNumber + position) & Frame.IdMask);

        private void AddChunk(int firstFrameBytes)
        {
            PublishChunk chunk = new PublishChunk(PublishedPosition, firstFrameBytes);
            if (_last == null)
                _first = chunk;
            else
                _last.Next = chunk;
            _last = chunk;
            _sending ??= chunk;
            ReleaseConfirmedChunks();
        }

        private void ConfirmUntil(long position)
        {
            ConfirmedPosition = position;
            for (PublishChunk? chunk = _first; chunk != null && chunk.FirstPosition < position; chunk = chunk.Next)
            {
                int count = (int)Math.Min(chunk.MessageCount, position - chunk.FirstPosition);
                int bytes = chunk.OffsetOf(count) - chunk.OffsetOf(chunk.ConfirmedCount);
                UnconfirmedBytes -= bytes;
                _inFlightBytes -= bytes;
                chunk.ConfirmedCount = count;
            }
            ReleaseConfirmedChunks();
        }

        /// <summary>Release the first chunks, except the last one, which is filled further.</summary>
        private void ReleaseConfirmedChunks()
        {
            while (_first != null && _first != _last && _first.IsConfirmed && !_first.IsBeingWritten)
            {
                PublishChunk confirmed = _first;
                _first = confirmed.Next;
                if (_sending == confirmed)
                    _sending = _first;
                confirmed.Release();
            }
        }
    }
}
