using System;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;

namespace SimpleBus.Client
{
    /// <summary>Handler of the messages of a class, made by <see cref="Bus.HandleAsync{T}"/>.</summary>
    public abstract class MessageHandler : IAsyncDisposable, IStoppable
    {
        private protected MessageHandler()
        {
        }

        /// <summary>
        /// Ends when the handler has stopped. Fails with a <see cref="BusException"/> if the server has ended the
        /// subscription, or the connection is lost for good.
        /// </summary>
        public abstract Task Completion { get; }

        /// <summary>Receive no more messages, and wait until those being processed are finished.</summary>
        /// <param name="cancellationToken">Cancels the handlers that still run, and ends waiting.</param>
        /// <returns>A task that ends when the subscription has ended.</returns>
        public abstract Task StopAsync(CancellationToken cancellationToken = default);

        /// <summary>Stop without a time limit.</summary>
        /// <returns>A task that ends when the subscription has ended.</returns>
        public async ValueTask DisposeAsync() => await StopAsync().ConfigureAwait(false);
    }

    /// <summary>Handler of messages with values of one type.</summary>
    internal sealed class MessageHandler<T> : MessageHandler
    {
        private readonly Bus _bus;
        private readonly Inbox _inbox;
        private readonly Func<Message<T>, CancellationToken, ValueTask> _handler;
        private readonly int _concurrency;
        private readonly SemaphoreSlim _slots;
        private readonly CancellationTokenSource _cancelled;
        private volatile bool _isStopping;

        public MessageHandler(
            Bus bus, Inbox inbox, Func<Message<T>, CancellationToken, ValueTask> handler, int concurrency)
        {
            _bus = bus;
            _inbox = inbox;
            _handler = handler;
            _concurrency = concurrency;
            _slots = new SemaphoreSlim(concurrency);
            _cancelled = CancellationTokenSource.CreateLinkedTokenSource(bus.Connection.Closing);
            Completion = Task.Run(RunAsync);
            BusConnection.ObserveFailure(Completion); // The program may not await it.
        }

        public override Task Completion { get; }

        public override async Task StopAsync(CancellationToken cancellationToken = default)
        {
            _isStopping = true;
            _inbox.Signal();
            using (cancellationToken.Register(Cancel))
                await BusConnection.WaitAsync(new ValueTask<bool>(WhenEndedAsync()), cancellationToken)
                    .ConfigureAwait(false);
        }

        private async Task<bool> WhenEndedAsync()
        {
            try
            {
                await Completion.ConfigureAwait(false);
            }
            catch (BusException)
            {
                // Completion reports it.
            }
            return true;
        }

        private void Cancel()
        {
            try
            {
                _cancelled.Cancel();
            }
            catch (ObjectDisposedException)
            {
                // The handler has ended.
            }
            catch (AggregateException error)
            {
                _bus.Connection.Log(BusLogLevel.Error, "a cancellation callback failed", error);
            }
        }

        private async Task RunAsync()
        {
            try
            {
                while (!_isStopping)
                {
                    ReceivedBatch? batch = _inbox.TryDequeueBatch(out bool isEnded);
                    if (batch != null)
                        await ProcessAsync(batch).ConfigureAwait(false);
                    else if (isEnded)
                        break;
                    else
                        await _inbox.WaitAsync().ConfigureAwait(false);
                }
            }
            finally
            {
                for (int running = 0; running < _concurrency; running++)
                    await _slots.WaitAsync().ConfigureAwait(false);
                _bus.Remove(this);
                await _bus.Connection.UnsubscribeAsync(_inbox).ConfigureAwait(false);
                _cancelled.Dispose(); // Otherwise the bus would keep a reference to each ended handler.
            }
        }

        private async Task ProcessAsync(ReceivedBatch batch)
        {
            for (int index = 0; index < batch.Count; index++)
            {
                await _slots.WaitAsync().ConfigureAwait(false);
                Message<T>? message = null;
                if (_isStopping || !_inbox.TryBeginProcessing(index))
                {
                    _slots.Release();
                    break;
                }
                message = Message<T>.Create(_bus, _inbox, batch, index);
                if (message == null)
                    _slots.Release();
                else if (_concurrency == 1)
                    await HandleAsync(message).ConfigureAwait(false);
                else
                    _ = Task.Run(() => HandleAsync(message));
            }
            _inbox.Release(batch);
        }

        /// <summary>Call the handler and settle the message. Never fails.</summary>
        private async Task HandleAsync(Message<T> message)
        {
            try
            {
                await _handler(message, _cancelled.Token).ConfigureAwait(false);
                await message.AckAsync().ConfigureAwait(false);
            }
            catch (Exception error)
            {
                _bus.Connection.Log(
                    BusLogLevel.Warning,
                    $"the handler of message {message.Sequence} of class {message.ClassId} failed: {error.Message}", error);
                await message.NackAsync(null, $"{error.GetType().Name}: {error.Message}").ConfigureAwait(false);
            }
            finally
            {
                _slots.Release();
            }
        }
    }
}
