using System;
using System.Collections.Generic;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client
{
    /// <summary>
    /// Subscription to a class. It is read by one loop, and ends with it:
    /// <code>
    /// await foreach (Message&lt;Order&gt; message in bus.SubscribeAsync&lt;Order&gt;("orders", durable: "billing"))
    ///     Process(message.Value);
    /// </code>
    /// <para>A message is acknowledged when the loop asks for the next one. If the loop ends in another way, by
    /// <c>break</c>, an exception or cancellation, the last message returns to the server, unless AckAsync was called.</para>
    /// </summary>
    /// <typeparam name="T">Type of the values.</typeparam>
    public sealed class Subscription<T> : IAsyncEnumerable<Message<T>>, IAsyncDisposable, IStoppable
    {
        private readonly Bus _bus;
        private readonly ClassReference _target;
        private readonly SubscribeRequest _request;
        private readonly bool _autoAck;
        private readonly CancellationToken _cancellationToken;
        private readonly object _lock = new object();
        private readonly TaskCompletionSource<bool> _readingEnded =
            new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
        private Task<Inbox>? _opening;
        private bool _isReading;
        private volatile bool _isStopping;

        internal Subscription(
            Bus bus, ClassReference target, SubscribeRequest request, bool autoAck, CancellationToken cancellationToken)
        {
            _bus = bus;
            _target = target;
            _request = request;
            _autoAck = autoAck;
            _cancellationToken = cancellationToken;
        }

        /// <summary>Subscribe now, and wait for the reply of the server. A loop does this itself.</summary>
        /// <param name="cancellationToken">Ends waiting and the subscription.</param>
        /// <returns>A task that ends when the subscription is active.</returns>
        /// <exception cref="RefusedException">The server refuses the subscription.</exception>
        public Task OpenAsync(CancellationToken cancellationToken = default) => GetInboxAsync(cancellationToken);

        /// <inheritdoc/>
        public async IAsyncEnumerator<Message<T>> GetAsyncEnumerator(CancellationToken cancellationToken = default)
        {
            using CancellationTokenSource cancelled =
                CancellationTokenSource.CreateLinkedTokenSource(_cancellationToken, cancellationToken);
            BeginReading();
            Message<T>? message = null;
            try
            {
                Inbox inbox = await GetInboxAsync(cancelled.Token).ConfigureAwait(false);
                using CancellationTokenRegistration signal = cancelled.Token.Register(inbox.Signal);
                while (await NextBatchAsync(inbox, cancelled.Token).ConfigureAwait(false) is ReceivedBatch batch)
                {
                    for (int index = 0; index < batch.Count && !_isStopping; index++)
                    {
                        cancelled.Token.ThrowIfCancellationRequested();
                        if (!inbox.TryBeginProcessing(index))
                            break;
                        message = Message<T>.Create(_bus, inbox, batch, index);
                        if (message == null)
                            continue;
                        yield return message;
                        if (_autoAck)
                            await message.AckAsync().ConfigureAwait(false);
                        message = null;
                    }
                    inbox.Release(batch);
                }
            }
            finally
            {
                if (_autoAck)
                    message?.Return();
                await DisposeAsync().ConfigureAwait(false);
                _readingEnded.TrySetResult(true);
            }
        }

        /// <summary>
        /// Read messages in batches, which is the fastest way. With automatic acknowledgement, the messages of a batch
        /// that were not rejected are acknowledged when the loop asks for the next one.
        /// </summary>
        /// <param name="cancellationToken">Ends the loop and the subscription.</param>
        /// <returns>The batches.</returns>
        public async IAsyncEnumerable<MessageBatch> ReadBatchesAsync(
            [EnumeratorCancellation] CancellationToken cancellationToken = default)
        {
            using CancellationTokenSource cancelled =
                CancellationTokenSource.CreateLinkedTokenSource(_cancellationToken, cancellationToken);
            BeginReading();
            try
            {
                Inbox inbox = await GetInboxAsync(cancelled.Token).ConfigureAwait(false);
                using CancellationTokenRegistration signal = cancelled.Token.Register(inbox.Signal);
                while (await NextBatchAsync(inbox, cancelled.Token).ConfigureAwait(false) is ReceivedBatch received)
                {
                    inbox.BeginProcessing(received);
                    MessageBatch batch = new MessageBatch(inbox, received, _bus.Connection.Serializer);
                    try
                    {
                        yield return batch;
                        if (_autoAck)
                            await batch.AckAsync().ConfigureAwait(false);
                    }
                    finally
                    {
                        inbox.Release(received);
                    }
                }
            }
            finally
            {
                await DisposeAsync().ConfigureAwait(false);
                _readingEnded.TrySetResult(true);
            }
        }

        /// <summary>End the subscription. A durable keeps its position on the server.</summary>
        /// <returns>A task that ends when the server has ended the subscription.</returns>
        public async ValueTask DisposeAsync()
        {
            Task<Inbox>? opening;
            lock (_lock)
            {
                _isStopping = true;
                opening = _opening;
            }
            _bus.Remove(this);
            if (opening == null)
                return;
            Inbox inbox;
            try
            {
                inbox = await opening.ConfigureAwait(false);
            }
            catch (Exception)
            {
                return; // It was never active; OpenAsync or the loop reports why.
            }
            await _bus.Connection.UnsubscribeAsync(inbox).ConfigureAwait(false);
        }

        /// <summary>End the loop when it asks for the next message, and wait for it.</summary>
        async Task IStoppable.StopAsync(CancellationToken cancellationToken)
        {
            bool isReading;
            Task<Inbox>? opening;
            lock (_lock)
            {
                _isStopping = true;
                isReading = _isReading;
                opening = _opening;
            }
            Task<bool> ended = isReading && opening != null ? _readingEnded.Task : EndAsync();
            if (opening?.Status == TaskStatus.RanToCompletion)
                opening.Result.Signal();
            await BusConnection.WaitAsync(new ValueTask<bool>(ended), cancellationToken).ConfigureAwait(false);
        }

        private async Task<bool> EndAsync()
        {
            await DisposeAsync().ConfigureAwait(false);
            return true;
        }

        private Task<Inbox> GetInboxAsync(CancellationToken cancellationToken)
        {
            lock (_lock)
            {
                if (_isStopping)
                    throw new ObjectDisposedException(nameof(Subscription<T>), "the subscription has ended; subscribe again");
                if (_opening == null)
                {
                    _bus.Add(this);
                    _opening = _bus.Connection.SubscribeAsync(_target, _request, _autoAck, cancellationToken);
                }
                return _opening;
            }
        }

        /// <summary>Wait for the next messages. Returns null at the end.</summary>
        private async ValueTask<ReceivedBatch?> NextBatchAsync(Inbox inbox, CancellationToken cancellationToken)
        {
            while (true)
            {
                cancellationToken.ThrowIfCancellationRequested();
                if (_isStopping)
                    return null;
                ReceivedBatch? batch = inbox.TryDequeueBatch(out bool isEnded);
                if (batch != null || isEnded)
                    return batch;
                await inbox.WaitAsync().ConfigureAwait(false);
            }
        }

        private void BeginReading()
        {
            lock (_lock)
            {
                if (_isReading)
                    throw new InvalidOperationException("a subscription is read by one loop only; subscribe again");
                _isReading = true;
            }
        }
    }
}
