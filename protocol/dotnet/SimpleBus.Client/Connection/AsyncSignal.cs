using System;
using System.Threading.Tasks;
using System.Threading.Tasks.Sources;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Signal with one waiter at a time, which allocates nothing. A signal without a waiter is kept for the next one.
    /// </summary>
    internal sealed class AsyncSignal : IValueTaskSource<bool>
    {
        private readonly object _lock = new object();
        private ManualResetValueTaskSourceCore<bool> _core;
        private bool _isSet;
        private bool _isWaiting;

        public AsyncSignal()
        {
            _core.RunContinuationsAsynchronously = true;
        }

        public void Set()
        {
            lock (_lock)
            {
                if (!_isWaiting)
                {
                    _isSet = true;
                    return;
                }
                _isWaiting = false;
            }
            _core.SetResult(true);
        }

        /// <summary>Wait until the signal is set, and reset it.</summary>
        public ValueTask<bool> WaitAsync()
        {
            lock (_lock)
            {
                if (_isWaiting)
                    throw new InvalidOperationException("another call already waits for the signal; expected one at a time");
                if (_isSet)
                {
                    _isSet = false;
                    return new ValueTask<bool>(true);
                }
                _core.Reset();
                _isWaiting = true;
                return new ValueTask<bool>(this, _core.Version);
            }
        }

        bool IValueTaskSource<bool>.GetResult(short token) => _core.GetResult(token);

        ValueTaskSourceStatus IValueTaskSource<bool>.GetStatus(short token) => _core.GetStatus(token);

        void IValueTaskSource<bool>.OnCompleted(
            Action<object?> continuation, object? state, short token, ValueTaskSourceOnCompletedFlags flags) =>
            _core.OnCompleted(continuation!, state, token, flags);
    }
}
