using System;
using System.Threading;
using System.Threading.Tasks;

namespace SimpleBus.Client.Connection
{
    /// <content>Publishing: messages, back-pressure and confirms.</content>
    internal sealed partial class BusConnection
    {
        private bool IsFull => _publishBuffer.UnconfirmedBytes >= _options.UnconfirmedBytesMax;

        public bool TryGetClassId(ClassReference target, out ushort classId) => _classes.TryGetId(target, out classId);

        /// <summary>Queue a message unless the program must wait.</summary>
        /// <returns>False if unconfirmed messages use all their space, or others wait already.</returns>
        public bool TryPublish(
            byte type, ushort classId, ReadOnlySpan<byte> content, out ValueTask<Confirm> confirm)
        {
            Session? session;
            bool isIdle;
            lock (_lock)
            {
                CheckOpen();
                confirm = default;
                if (_waitingPublishers > 0 || IsFull)
                    return false;
                isIdle = _publishBuffer.UnconfirmedBytes == 0;
                long position = _publishBuffer.Append(type, classId, content);
                confirm = _confirms.Add(position, position).Task;
                session = TryBeginWriting();
            }
            // A program that publishes one message at a time waits for its confirm, so the message is written at
            // once. Otherwise the messages of the next moment are written together.
            StartWriting(session, isIdle);
            return true;
        }

        /// <summary>Queue messages in parts, as soon as their class has an id and there is space.</summary>
        /// <param name="target">Class of the messages.</param>
        /// <param name="messages">Encoded messages; filled with the next part by <paramref name="encodeNext"/>.</param>
        /// <param name="encodeNext">Encodes the next part and returns true, or returns false at the end.</param>
        /// <param name="cancellationToken">Ends waiting. Messages that were queued are published nevertheless.</param>
        public async ValueTask<Confirm> PublishManyAsync(
            ClassReference target, EncodedMessages messages, Func<bool> encodeNext,
            CancellationToken cancellationToken)
        {
            ValueTask<Confirm> confirm = default;
            ConfirmWaiter? waiter = null;
            await EnterPublishTurnAsync(cancellationToken).ConfigureAwait(false);
            try
            {
                ushort classId = await ResolveAsync(target, cancellationToken).ConfigureAwait(false);
                do
                {
                    await WaitForSpaceAsync(cancellationToken).ConfigureAwait(false);
                    Session? session;
                    lock (_lock)
                    {
                        CheckOpen();
                        if (waiter == null)
                        {
                            // Messages of the first parts may be refused before the last part is queued.
                            waiter = _confirms.Add(_publishBuffer.PublishedPosition, long.MaxValue);
                            confirm = waiter.Task;
                        }
                        for (int index = 0; index < messages.Count; index++)
                            _publishBuffer.Append(messages.TypeOf(index), classId, messages.ContentOf(index));
                        session = TryBeginWriting();
                    }
                    StartWriting(session, false);
                }
                while (encodeNext());
            }
            finally
            {
                if (waiter != null)
                    lock (_lock)
                    {
                        waiter.End(_publishBuffer.PublishedPosition - 1);
                        _confirms.Confirm(_publishBuffer.ConfirmedPosition, _level);
                    }
                LeavePublishTurn();
            }
            return await WaitAsync(confirm, cancellationToken).ConfigureAwait(false);
        }

        /// <summary>Wait until all messages published before are stored or refused.</summary>
        public async ValueTask FlushAsync(CancellationToken cancellationToken)
        {
            ValueTask<Confirm> confirm;
            await EnterPublishTurnAsync(cancellationToken).ConfigureAwait(false);
            try
            {
                lock (_lock)
                {
                    CheckOpen();
                    confirm = AddWaiter(_publishBuffer.PublishedPosition);
                }
            }
            finally
            {
                LeavePublishTurn();
            }
            await WaitAsync(confirm, cancellationToken).ConfigureAwait(false);
        }

        /// <summary>Throw if no server would accept content of this length.</summary>
        public void CheckLength(int contentBytes)
        {
            int limit = _frameBytesMax - Protocol.Frame.Overhead;
            if (contentBytes > limit)
                throw new ArgumentException(
                    $"a message has {contentBytes} bytes with its metadata; expected at most {limit}");
        }

        /// <summary>Return the task, which ends at a cancellation.</summary>
        public static ValueTask<T> WaitAsync<T>(ValueTask<T> task, CancellationToken cancellationToken)
        {
            return task.IsCompleted || !cancellationToken.CanBeCanceled
                ? task : new ValueTask<T>(WaitForTaskAsync(task.AsTask(), cancellationToken));
        }

        private static async Task<T> WaitForTaskAsync<T>(Task<T> task, CancellationToken cancellationToken)
        {
            TaskCompletionSource<bool> cancelled =
                new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            using (cancellationToken.Register(() => cancelled.TrySetResult(true)))
            {
                if (await Task.WhenAny(task, cancelled.Task).ConfigureAwait(false) != task)
                {
                    ObserveFailure(task);
                    throw new OperationCanceledException(cancellationToken);
                }
            }
            return await task.ConfigureAwait(false);
        }

        /// <summary>Mark a later failure as observed, because no call waits for the task any more.</summary>
        public static void ObserveFailure(Task task) =>
            task.ContinueWith(
                ended => _ = ended.Exception, CancellationToken.None,
                TaskContinuationOptions.OnlyOnFaulted | TaskContinuationOptions.ExecuteSynchronously,
                TaskScheduler.Default);

        /// <summary>Wait for the messages from a position on. Under the lock.</summary>
        private ValueTask<Confirm> AddWaiter(long first)
        {
            ValueTask<Confirm> confirm = _confirms.Add(first, _publishBuffer.PublishedPosition - 1).Task;
            _confirms.Confirm(_publishBuffer.ConfirmedPosition, _level);
            return confirm;
        }

        /// <summary>Note confirms and refusals up to the confirmed position. Under the lock.</summary>
        private void Confirmed()
        {
            _confirms.Confirm(_publishBuffer.ConfirmedPosition, _level);
            if (_space != null && !IsFull)
            {
                _space.TrySetResult(true);
                _space = null;
            }
        }

        private async Task EnterPublishTurnAsync(CancellationToken cancellationToken)
        {
            lock (_lock)
                _waitingPublishers++;
            try
            {
                await _publishTurn.WaitAsync(cancellationToken).ConfigureAwait(false);
            }
            catch
            {
                lock (_lock)
                    _waitingPublishers--;
                throw;
            }
        }

        private void LeavePublishTurn()
        {
            lock (_lock)
                _waitingPublishers--;
            _publishTurn.Release();
        }

        private async Task WaitForSpaceAsync(CancellationToken cancellationToken)
        {
            while (true)
            {
                Task<bool> space;
                lock (_lock)
                {
                    CheckOpen();
                    if (!IsFull)
                        return;
                    _space ??= new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
                    space = _space.Task;
                }
                await WaitAsync(new ValueTask<bool>(space), cancellationToken).ConfigureAwait(false);
            }
        }
    }
}
