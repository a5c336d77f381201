using System;
using System.Collections.Generic;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Received messages of one subscription, and the acks that wait to be sent. Thread-safe, for one consumer.
    /// <para>The server limits the messages in flight to a subscription, so the inbox is bounded and the reader never
    /// waits for it. The server may redeliver a message that is still here or whose ack is not sent yet; such a
    /// redelivery is dropped.</para>
    /// </summary>
    internal sealed class Inbox
    {
        private const int AckBatchMessages = 4096;

        private readonly object _lock = new object();
        private readonly BusConnection _connection;
        private readonly Queue<ReceivedBatch> _batches = new Queue<ReceivedBatch>();
        private readonly HashSet<long> _processing = new HashSet<long>();
        private readonly AsyncSignal _changed = new AsyncSignal();
        private AckBuffer _acks;
        private ReceivedBatch? _current;
        private int _currentIndex;

        // Sequences of the unread messages of `_acks`, from the first redelivery on until none is unread. Without
        // redeliveries it is null, because each message would cost an insertion.
        private HashSet<long>? _unread;
        private long _nextSequence = -1;
        private string _bus = "";
        private string _run = "";
        private bool _isSubscribed;
        private bool _isEnded;
        private Exception? _error;

        public Inbox(
            BusConnection connection, ushort classId, ushort number, SubscribeRequest request, bool isAutoAck)
        {
            _connection = connection;
            ClassId = classId;
            Number = number;
            Request = request;
            IsAutoAck = isAutoAck;
            _acks = new AckBuffer(number);
        }

        public ushort ClassId { get; }

        /// <summary>Subscription number.</summary>
        public ushort Number { get; }

        public SubscribeRequest Request { get; }

        /// <summary>True if the client acknowledges messages for the program.</summary>
        public bool IsAutoAck { get; }

        /// <summary>Number of the last Subscribe request. Under the lock of the connection.</summary>
        public uint SubscribeNumber { get; set; }

        /// <summary>Number of Subscribes that were refused one after another, because the durable is in use. Only for
        /// the reader.</summary>
        public int RefusedRetryCount { get; set; }

        /// <summary>Ends when the server has replied to the first Subscribe.</summary>
        public TaskCompletionSource<bool> WhenSubscribed { get; } =
            new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);

        /// <summary>True if the server has accepted the subscription once.</summary>
        public bool WasSubscribed => _nextSequence >= 0;

        /// <summary>Number of acks that are not sent yet.</summary>
        public long PendingAckCount
        {
            get
            {
                lock (_lock)
                    return _acks.PendingCount;
            }
        }

        // Called by the reader, or with the lock of the connection held ---------------------------

        /// <summary>Return the content of the next Subscribe request.</summary>
        public byte[] WriteSubscribe(string bus)
        {
            ByteWriter writer = new ByteWriter();
            bool isContinued = WasSubscribed && !Request.HasKeptPosition && bus == _bus
                && Request.Start != StartPosition.Waiting;
            Request.Write(writer, isContinued ? _nextSequence : (long?)null);
            return writer.WrittenSpan.ToArray();
        }

        /// <summary>Continue after the server has accepted the subscription.</summary>
        public void Subscribed(SubscribeReply reply, string bus, string run)
        {
            lock (_lock)
            {
                bool isSameRun = _run == run && _bus == bus;
                bool isKept = isSameRun && (reply.IsResumed || !Request.HasKeptPosition);
                if (!isKept || reply.Cursor < _nextSequence)
                {
                    // A server that restarted may use the sequences of lost messages for other messages.
                    _acks.Close();
                    _acks = new AckBuffer(Number);
                    _unread = null;
                    if (Request.HasKeptPosition)
                        DiscardUnread(); // The server sends them again.
                    _nextSequence = reply.Cursor;
                }
                _bus = bus;
                _run = run;
                _isSubscribed = true;
                RefusedRetryCount = 0;
            }
        }

        public void ConnectionLost()
        {
            lock (_lock)
            {
                _isSubscribed = false;
                if (Request.Group != null)
                    DiscardUnread(); // The server sends them to other members.
            }
        }

        /// <summary>Add received messages.</summary>
        public void Accept(ReceivedBatch batch)
        {
            lock (_lock)
            {
                if (_isEnded || !_isSubscribed)
                {
                    batch.Release();
                    return;
                }
                batch.Acks = _acks;
                long next = _nextSequence;
                bool hasOlder = false;
                for (int index = 0; index < batch.Count; index++)
                {
                    long sequence = SequenceOf((uint)batch[index].Sequence);
                    batch[index].Sequence = sequence;
                    hasOlder |= sequence < next;
                    _nextSequence = Math.Max(_nextSequence, sequence + 1);
                }
                if (hasOlder)
                    batch.RemoveAll(sequence => sequence < next && IsHere(sequence));
                if (batch.Count == 0)
                {
                    batch.Release();
                    return;
                }
                _batches.Enqueue(batch);
                if (_unread != null)
                    AddUnread(_unread, batch, 0);
            }
            _changed.Set();
        }

        /// <summary>Append pending acks to a writer, if the server accepts them now.</summary>
        public void WriteAcks(ByteWriter writer)
        {
            lock (_lock)
            {
                if (_isSubscribed && !_acks.IsEmpty)
                    _acks.WriteTo(writer);
            }
        }

        /// <summary>
        /// Let the server send unread messages of a position that it keeps again at once. Otherwise those that were
        /// delivered before would wait for their backoff.
        /// </summary>
        public void ReturnUnread()
        {
            lock (_lock)
            {
                if (!_isSubscribed || !Request.HasKeptPosition)
                    return;
                if (_current != null)
                    ReturnUnread(_current, _currentIndex);
                foreach (ReceivedBatch batch in _batches)
                    ReturnUnread(batch, 0);
            }
        }

        /// <summary>End the inbox. With an error, messages received before can still be read.</summary>
        public void End(Exception? error)
        {
            lock (_lock)
            {
                if (_isEnded)
                    return;
                _isEnded = true;
                _error = error;
                if (error == null)
                    DiscardUnread();
            }
            WhenSubscribed.TrySetException(error ?? new BusConnectionException("the subscription was closed"));
            _ = WhenSubscribed.Task.Exception; // No call waits for it if it was accepted before.
            _changed.Set();
        }

        // Called by the consumer --------------------------------------------------------------------

        /// <summary>Wait until <see cref="TryDequeueBatch"/> may return something else.</summary>
        public ValueTask<bool> WaitAsync() => _changed.WaitAsync();

        /// <summary>Let <see cref="WaitAsync"/> return.</summary>
        public void Signal() => _changed.Set();

        /// <summary>Make the next messages current. The previous ones must have been handed out.</summary>
        /// <returns>The messages; null if there are none.</returns>
        /// <exception cref="BusException">The server has ended the subscription, or the bus has ended.</exception>
        public ReceivedBatch? TryDequeueBatch(out bool isEnded)
        {
            lock (_lock)
            {
                isEnded = false;
                if (_current != null)
                    AdvanceCurrent(_current.Count);
                _current = null;
                _currentIndex = 0;
                if (_batches.Count > 0)
                    return _current = _batches.Dequeue();
                _unread = null;
                isEnded = _isEnded;
                if (_error != null)
                    throw _error;
                return null;
            }
        }

        /// <summary>Note that the current batch is handed out as a whole.</summary>
        public void BeginProcessing(ReceivedBatch batch)
        {
            lock (_lock)
            {
                // A program that acknowledges itself may have lost the messages, so redeliveries are passed on.
                if (_current == batch && !IsAutoAck)
                    AdvanceCurrent(batch.Count);
            }
        }

        /// <summary>Note that a message of the current batch is handed out.</summary>
        /// <returns>False if the batch was discarded meanwhile.</returns>
        public bool TryBeginProcessing(int index)
        {
            lock (_lock)
            {
                if (_current == null || _isEnded)
                    return false;
                AdvanceCurrent(index + 1);
                if (IsAutoAck)
                    _processing.Add(_current[index].Sequence);
                return true;
            }
        }

        /// <summary>
        /// Release a batch that the consumer has finished. One with unread messages is kept, because
        /// <see cref="ReturnUnread()"/> needs it.
        /// </summary>
        public void Release(ReceivedBatch batch)
        {
            lock (_lock)
            {
                if (_current != batch || _currentIndex == batch.Count)
                    batch.Release();
            }
        }

        /// <summary>Acknowledge messages.</summary>
        public void Ack(AckBuffer acks, long first, long end)
        {
            bool isFirst;
            bool isDue;
            lock (_lock)
            {
                RemoveProcessing(first, end);
                if (!acks.IsOpen)
                    return;
                isFirst = acks.IsEmpty;
                acks.Ack(first, end);
                isDue = acks.PendingCount >= AckBatchMessages;
            }
            if (isDue)
                _connection.SendAcks();
            else if (isFirst)
                _connection.ScheduleAcks();
        }

        /// <summary>Acknowledge all messages of a batch.</summary>
        /// <exception cref="ObjectDisposedException">The batch was released.</exception>
        public void Ack(ReceivedBatch batch)
        {
            bool isDue;
            lock (_lock)
            {
                batch.CheckValid();
                if (_current == batch)
                    AdvanceCurrent(batch.Count);
                if (!batch.Acks.IsOpen)
                    return;
                for (int index = 0; index < batch.Count;)
                {
                    long first = batch[index].Sequence;
                    long end = first + 1;
                    for (index++; index < batch.Count && batch[index].Sequence == end; index++)
                        end++;
                    batch.Acks.Ack(first, end);
                }
                isDue = batch.Acks.PendingCount >= AckBatchMessages;
            }
            if (isDue)
                _connection.SendAcks();
            else
                _connection.ScheduleAcks();
        }

        /// <summary>
        /// Let the server send a message again at once, when the subscription ends. Before, this subscription would
        /// receive it.
        /// </summary>
        public void Return(AckBuffer acks, long sequence)
        {
            lock (_lock)
            {
                RemoveProcessing(sequence, sequence + 1);
                if (acks.IsOpen)
                    acks.Append(FrameType.Nack, sequence, sequence + 1, 0, "0", null);
            }
        }

        /// <summary>Reject a message, or restart its ack timeout.</summary>
        public void Settle(
            AckBuffer acks, byte type, long sequence, int attempt, string option = "", string? error = null)
        {
            lock (_lock)
            {
                if (type == FrameType.Nack)
                    RemoveProcessing(sequence, sequence + 1);
                if (!acks.IsOpen)
                    return;
                // For the server, a redelivery that the inbox dropped is the last attempt.
                acks.Append(type, sequence, sequence + 1, IsAutoAck ? 0 : attempt, option, error);
            }
            _connection.SendAcks();
        }

        private void RemoveProcessing(long first, long end)
        {
            if (_processing.Count == 0)
                return;
            for (long sequence = first; sequence < end; sequence++)
                _processing.Remove(sequence);
        }

        /// <summary>Return whether the message waits here, is being processed, or is acknowledged.</summary>
        private bool IsHere(long sequence)
        {
            if (_processing.Contains(sequence) || _acks.Contains(sequence))
                return true;
            if (_unread == null)
            {
                _unread = new HashSet<long>();
                if (_current != null)
                    AddUnread(_unread, _current, _currentIndex);
                foreach (ReceivedBatch batch in _batches)
                    AddUnread(_unread, batch, 0);
            }
            return _unread.Contains(sequence);
        }

        private void AddUnread(HashSet<long> unread, ReceivedBatch batch, int first)
        {
            if (batch.Acks != _acks)
                return; // Another position, whose sequences may be those of other messages.
            for (int index = first; index < batch.Count; index++)
                unread.Add(batch[index].Sequence);
        }

        /// <summary>Note that the messages of the current batch before an index are handed out.</summary>
        private void AdvanceCurrent(int end)
        {
            if (_unread != null && _current!.Acks == _acks)
                for (int index = _currentIndex; index < end; index++)
                    _unread.Remove(_current[index].Sequence);
            _currentIndex = end;
        }

        private static void ReturnUnread(ReceivedBatch batch, int index)
        {
            if (!batch.Acks.IsOpen)
                return;
            while (index < batch.Count)
            {
                long first = batch[index].Sequence;
                long end = first + 1;
                for (index++; index < batch.Count && batch[index].Sequence == end && (end & Frame.IdMask) != 0; index++)
                    end++;
                batch.Acks.Append(FrameType.Nack, first, end, 0, "0", null);
            }
        }

        private void DiscardUnread()
        {
            // The current batch is released by its consumer when TryBeginProcessing returns false.
            _current = null;
            _unread = null;
            foreach (ReceivedBatch batch in _batches)
                batch.Release();
            _batches.Clear();
        }

        private long SequenceOf(uint id)
        {
            long difference = (id - _nextSequence) & Frame.IdMask;
            if (difference > Frame.IdMask / 2)
                difference -= Frame.IdMask + 1L;
            return _nextSequence + difference;
        }
    }
}
