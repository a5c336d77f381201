using System;
using System.Collections.Concurrent;
using System.Collections.Generic;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Waiters for confirms, ordered by their last position. Only <see cref="Recycle"/> may be called without the
    /// lock of the connection.
    /// </summary>
    internal sealed class PendingConfirms
    {
        private const int RecycledMax = 1024;

        private readonly Queue<ConfirmWaiter> _waiters = new Queue<ConfirmWaiter>();
        private readonly ConcurrentQueue<ConfirmWaiter> _recycled = new ConcurrentQueue<ConfirmWaiter>();

        /// <summary>
        /// Add a waiter. Its last position must not be below that of earlier waiters. While the last position of a
        /// waiter is not known, no other one may be added.
        /// </summary>
        public ConfirmWaiter Add(long first, long last)
        {
            if (!_recycled.TryDequeue(out ConfirmWaiter? waiter))
                waiter = new ConfirmWaiter(this);
            waiter.Start(first, last);
            _waiters.Enqueue(waiter);
            return waiter;
        }

        /// <summary>Note that the messages first..last were refused.</summary>
        public void Refuse(long first, long last, string code, string message)
        {
            foreach (ConfirmWaiter waiter in _waiters)
            {
                if (waiter.First > last)
                    break;
                for (long position = Math.Max(first, waiter.First); position <= Math.Min(last, waiter.Last); position++)
                    waiter.Refuse(position, code, message);
            }
        }

        /// <summary>Finish the waiters whose positions are all below <paramref name="confirmedPosition"/>.</summary>
        public void Confirm(long confirmedPosition, Durability durability)
        {
            while (_waiters.Count > 0 && _waiters.Peek().Last < confirmedPosition)
                _waiters.Dequeue().SetConfirmed(durability);
        }

        /// <summary>Fail all waiters, because no Confirm will arrive.</summary>
        public void Fail(Func<Exception> createError)
        {
            while (_waiters.Count > 0)
                _waiters.Dequeue().SetException(createError());
        }

        /// <summary>Keep a finished waiter for the next message.</summary>
        public void Recycle(ConfirmWaiter waiter)
        {
            if (_recycled.Count < RecycledMax)
                _recycled.Enqueue(waiter);
        }
    }
}
