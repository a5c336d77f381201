using System;
using System.Collections.Generic;
using System.Threading.Tasks;
using System.Threading.Tasks.Sources;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Waiter for the Confirm of the positions First..Last. Reused after its result was read, so that a confirmed
    /// publish allocates nothing.
    /// </summary>
    internal sealed class ConfirmWaiter : IValueTaskSource<Confirm>
    {
        private readonly PendingConfirms _owner;
        private ManualResetValueTaskSourceCore<Confirm> _core;
        private HashSet<long>? _refusedPositions;
        private string _refusalCode = "";
        private string _refusalMessage = "";

        public ConfirmWaiter(PendingConfirms owner)
        {
            _owner = owner;
            _core.RunContinuationsAsynchronously = true;
        }

        public long First { get; private set; }

        public long Last { get; private set; }

        public ValueTask<Confirm> Task => new ValueTask<Confirm>(this, _core.Version);

        public void Start(long first, long last)
        {
            First = first;
            Last = last;
            _refusedPositions = null;
        }

        /// <summary>Set the last position, because all messages are queued.</summary>
        public void End(long last) => Last = last;

        /// <summary>Note that a position was refused. The first refusal describes all of them.</summary>
        public void Refuse(long position, string code, string message)
        {
            if (_refusedPositions == null)
            {
                _refusedPositions = new HashSet<long>();
                _refusalCode = code;
                _refusalMessage = message;
            }
            // A message that is sent again after a reconnect is refused again.
            _refusedPositions.Add(position);
        }

        public void SetConfirmed(Durability durability)
        {
            if (_refusedPositions == null)
                _core.SetResult(new Confirm(durability));
            else
                _core.SetException(
                    new RefusedException(_refusalMessage, _refusalCode, _refusedPositions.Count));
        }

        public void SetException(Exception error) => _core.SetException(error);

        Confirm IValueTaskSource<Confirm>.GetResult(short token)
        {
            // A wrong read must not recycle a waiter that is in use.
            if (_core.GetStatus(token) == ValueTaskSourceStatus.Pending)
                throw new InvalidOperationException(
                    "the message is not confirmed yet; await the call, or use AsTask() to block until it is");
            try
            {
                return _core.GetResult(token);
            }
            finally
            {
                _core.Reset(); // A second read fails from now on.
                _owner.Recycle(this);
            }
        }

        ValueTaskSourceStatus IValueTaskSource<Confirm>.GetStatus(short token) => _core.GetStatus(token);

        void IValueTaskSource<Confirm>.OnCompleted(
            Action<object?> continuation, object? state, short token, ValueTaskSourceOnCompletedFlags flags) =>
            _core.OnCompleted(continuation!, state, token, flags);
    }
}
