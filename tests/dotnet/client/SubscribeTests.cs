using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Tests
{
    /// <summary>Subscriptions, acknowledgements and handlers at a live server.</summary>
    public static class SubscribeTests
    {
        [Test]
        public static async Task ADurableContinuesWhereItIs()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishManyAsync("durable", Enumerable.Range(0, 10));
            Check.Sequence(new[] { 0, 1, 2 }, await ReadAsync(bus.SubscribeAsync<int>("durable", durable: "d"), 3));
            // Breaking the loop does not acknowledge the last message.
            Check.Sequence(new[] { 2, 3 }, await ReadAsync(bus.SubscribeAsync<int>("durable", durable: "d"), 2));
            await foreach (Message<int> message in bus.SubscribeAsync<int>("durable", durable: "d"))
            {
                Check.Equal(3, message.Value);
                Check.True(message.Attempt > 1, "it is a redelivery");
                await message.AckAsync();
                break;
            }
            Check.Sequence(new[] { 4 }, await ReadAsync(bus.SubscribeAsync<int>("durable", durable: "d"), 1));
        }

        [Test]
        public static async Task ALeftMessageOfAnExceptionComesAgain()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishAsync("exception", 7);
            await Check.ThrowsAsync<NotSupportedException>(async () =>
            {
                await foreach (Message<int> message in bus.SubscribeAsync<int>("exception", durable: "d"))
                    throw new NotSupportedException();
            });
            Check.Sequence(new[] { 7 }, await ReadAsync(bus.SubscribeAsync<int>("exception", durable: "d"), 1));
        }

        [Test]
        public static async Task SelectsChannelsAndStart()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishAsync("channels", 0); // Names the class.
            await using Subscription<int> keeper = bus.SubscribeAsync<int>("channels", durable: "keeper");
            await keeper.OpenAsync();
            for (int number = 1; number < 9; number++)
                await bus.PublishAsync(
                    "channels", number, new PublishOptions { Channel = number % 2 == 0 ? "a.even" : "a.odd" });
            Subscription<int> even = bus.SubscribeAsync<int>(
                "channels", channels: new[] { "*.even" }, start: StartPosition.Earliest);
            Check.Sequence(new[] { 2, 4, 6, 8 }, await ReadAsync(even, 4));
            Check.Sequence(
                new[] { 5, 6 }, await ReadAsync(bus.SubscribeAsync<int>("channels", start: StartPosition.FromSequence(5)), 2));
            Check.Sequence(
                new[] { 8 }, await ReadAsync(bus.SubscribeAsync<int>("channels", start: StartPosition.Last), 1));
            DateTimeOffset longAgo = DateTimeOffset.UtcNow - TimeSpan.FromHours(1);
            Check.Sequence(
                new[] { 0, 1 }, await ReadAsync(bus.SubscribeAsync<int>("channels", start: StartPosition.FromTime(longAgo)), 2));
        }

        [Test]
        public static async Task NacksRedeliverAfterTheirDelay()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishManyAsync("nacks", new[] { 1, 2, 3 });
            List<string> got = new List<string>();
            await foreach (Message<int> message in bus.SubscribeAsync<int>("nacks"))
            {
                got.Add($"{message.Value}/{message.Attempt}");
                if (got.Count == 1)
                    await message.NackAsync(TimeSpan.Zero, "not today");
                if (got.Count == 4)
                    break;
            }
            Check.Sequence(new[] { "1/1", "1/2", "2/1", "3/1" }, got.OrderBy(entry => entry));
        }

        [Test]
        public static async Task TerminatedMessagesBecomeDeadLetters()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishManyAsync("terminated", new[] { 1, 2 });
            await foreach (Message<int> message in bus.SubscribeAsync<int>("terminated"))
            {
                if (message.Value == 2)
                    break;
                await message.WorkingAsync();
                await message.TerminateAsync("never");
            }
            await foreach (Message<int> dead in bus.SubscribeAsync<int>("dead.terminated"))
            {
                Check.Equal(1, dead.Value);
                Check.Equal("terminated", dead.GetHeader("dead-reason"));
                break;
            }
        }

        [Test]
        public static async Task ManualAcksAreLeftToTheProgram()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishManyAsync("manual", Enumerable.Range(0, 4));
            int count = 0;
            await foreach (Message<int> message in bus.SubscribeAsync<int>("manual", durable: "d", autoAck: false))
            {
                if (message.Value % 2 == 0)
                    await message.AckAsync();
                if (++count == 4)
                    break;
            }
            Check.Sequence(new[] { 1, 3 }, await ReadAsync(bus.SubscribeAsync<int>("manual", durable: "d"), 2));
        }

        [Test]
        public static async Task ReadsAndAcknowledgesBatches()
        {
            const int count = 100_000;
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            ValueTask<Confirm> published = bus.PublishManyAsync("batches", Enumerable.Range(0, count).Select(BitConverter.GetBytes));
            int next = 0;
            MessageBatch? last = null;
            await foreach (MessageBatch batch in bus.SubscribeAsync<byte[]>("batches", durable: "d").ReadBatchesAsync())
            {
                for (int index = 0; index < batch.Count; index++)
                    Check.Equal(next++, BitConverter.ToInt32(batch[index].Payload.Span));
                last = batch;
                if (next == count)
                {
                    await batch.AckAsync();
                    break;
                }
            }
            await published;
            Check.Throws<ObjectDisposedException>(() => _ = last![0].Payload);
            Check.Throws<ObjectDisposedException>(() => _ = last![0].Sequence);
            Check.Throws<ObjectDisposedException>(() => last!.AckAsync(0));
            await bus.PublishAsync("batches", BitConverter.GetBytes(-1));
            Check.Sequence(
                new[] { -1 },
                (await ReadAsync(bus.SubscribeAsync<byte[]>("batches", durable: "d"), 1)).Select(bytes => BitConverter.ToInt32(bytes)));
        }

        [Test]
        public static async Task ARejectedMessageLeavesTheRestOfItsBatchAcknowledged()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishManyAsync("rejected", new[] { 1, 2, 3 });
            List<int> got = new List<int>();
            Subscription<int> subscription = bus.SubscribeAsync<int>(
                "rejected", durable: "d", delivery: new DeliveryOptions { Backoff = new[] { TimeSpan.FromMilliseconds(1) } });
            await foreach (MessageBatch batch in subscription.ReadBatchesAsync())
            {
                for (int index = 0; index < batch.Count; index++)
                {
                    got.Add(batch[index].GetValue<int>());
                    if (got[^1] == 2 && batch.Attempt == 1)
                        await batch.NackAsync(index, "not today");
                }
                if (batch.Attempt > 1)
                {
                    await batch.AckAsync();
                    break;
                }
            }
            Check.Sequence(new[] { 1, 2, 3, 2 }, got);
            await bus.PublishAsync("rejected", 4);
            Check.Sequence(new[] { 4 }, await ReadAsync(bus.SubscribeAsync<int>("rejected", durable: "d"), 1));
        }

        [Test]
        public static async Task ABatchCannotBeAcknowledgedAfterTheNextOne()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishAsync("late-acks", 1);
            MessageBatch? last = null;
            await foreach (MessageBatch batch in bus.SubscribeAsync<int>("late-acks", autoAck: false).ReadBatchesAsync())
            {
                if (last != null)
                {
                    Check.Throws<ObjectDisposedException>(() => last.AckAsync());
                    break;
                }
                last = batch;
                await bus.PublishAsync("late-acks", 2);
            }
        }

        [Test]
        public static Task ReceivingABatchAllocatesNothingForAMessage()
        {
            const int count = 1000;
            ByteWriter frames = new ByteWriter();
            Frame.Append(frames, FrameType.Deliver, 7, 1, 3, default);
            for (uint id = 0; id < count; id++)
                Frame.Append(frames, FrameType.Message, 7, id, 0, new byte[16]);
            ReceiveBuffer buffer = new ReceiveBuffer();
            BatchBuilder builder = new BatchBuilder();
            Receive(); // Fills the pools.
            long before = GC.GetAllocatedBytesForCurrentThread();
            for (int round = 0; round < 100; round++)
                Check.Equal(16 * count, Receive());
            double perMessage = (GC.GetAllocatedBytesForCurrentThread() - before) / (100.0 * count);
            Check.True(perMessage < 1, $"{perMessage} bytes a message are less than one");
            return Task.CompletedTask;

            int Receive()
            {
                frames.WrittenMemory.CopyTo(buffer.GetSpace());
                buffer.Advance(frames.Count);
                while (buffer.TryReadFrame(out Frame frame))
                {
                    if (frame.IsMessage)
                        builder.Add(frame);
                    else
                        builder.SetDelivery(frame);
                }
                ReceivedBatch batch = builder.Build(buffer.Bytes);
                int bytes = 0;
                for (int index = 0; index < batch.Count; index++)
                    bytes += batch.ContentOf(index).Length;
                batch.Release();
                return bytes;
            }
        }

        [Test]
        public static async Task MembersOfAGroupShareMessages()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            List<string> got = new List<string>();
            TaskCompletionSource<bool> all = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            await using MessageHandler first = await HandleAsync("first");
            await using MessageHandler second = await HandleAsync("second");
            for (int number = 0; number < 200; number++)
                await bus.PublishAsync("group", number, new PublishOptions { Key = new[] { (byte)(number % 10) } });
            await all.Task;
            Check.Equal(200, got.Count);
            Check.Equal(200, got.Select(entry => entry.Split(' ')[1]).Distinct().Count());
            foreach (IGrouping<int, string> key in got.GroupBy(entry => int.Parse(entry.Split(' ')[1]) % 10))
            {
                List<int> numbers = key.Select(entry => int.Parse(entry.Split(' ')[1])).ToList();
                Check.Sequence(numbers.OrderBy(number => number), numbers);
            }

            Task<MessageHandler> HandleAsync(string name) => bus.HandleAsync<int>(
                "group",
                (message, _) =>
                {
                    lock (got)
                    {
                        got.Add($"{name} {message.Value}");
                        if (got.Count == 200)
                            all.SetResult(true);
                    }
                    return default;
                },
                concurrency: 4, group: "g", byKey: true);
        }

        [Test]
        public static async Task HandlersRunConcurrentlyAndFailuresComeAgain()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            TaskCompletionSource<bool> all = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            TaskCompletionSource<bool> failed = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            int running = 0;
            DeliveryOptions delivery = new DeliveryOptions { Backoff = new[] { TimeSpan.FromMilliseconds(1) } };
            await using MessageHandler handler = await bus.HandleAsync<int>(
                "handlers",
                async (message, cancellationToken) =>
                {
                    if (message.Value == 99 && message.Attempt == 1)
                        throw new NotSupportedException("not today");
                    if (message.Value == 99)
                    {
                        failed.TrySetResult(true);
                        return;
                    }
                    if (Interlocked.Increment(ref running) == 3)
                        all.TrySetResult(true);
                    await all.Task; // Ends only if three messages are handled at the same time.
                },
                concurrency: 3, delivery: delivery);
            await bus.PublishManyAsync("handlers", new[] { 0, 1, 2, 99 });
            await all.Task;
            await failed.Task;
        }

        [Test]
        public static async Task AHandlerThatHasEndedCanBeStoppedAgain()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            MessageHandler handler = await bus.HandleAsync<int>("ended", (_, __) => default);
            await handler.StopAsync();
            await handler.StopAsync(new CancellationToken(true));
        }

        [Test]
        public static async Task UndecodableMessagesAreRejected()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishAsync("undecodable", new byte[] { (byte)'{' });
            await bus.PublishAsync("undecodable", 5);
            TaskCompletionSource<int> decoded = new TaskCompletionSource<int>(TaskCreationOptions.RunContinuationsAsynchronously);
            DeliveryOptions delivery = new DeliveryOptions
            {
                MaxDeliveries = 1,
                Backoff = new[] { TimeSpan.FromMilliseconds(1) },
            };
            await using MessageHandler handler = await bus.HandleAsync<int>(
                "undecodable",
                (message, _) =>
                {
                    decoded.SetResult(message.Value);
                    return default;
                },
                delivery: delivery);
            Check.Equal(5, await decoded.Task);
            List<byte[]> dead = await ReadAsync(bus.SubscribeAsync<byte[]>("dead.undecodable"), 1);
            Check.Sequence(new[] { (byte)'{' }, dead[0]);
        }

        [Test]
        public static async Task RefusedSubscriptionsRaise()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            await using Subscription<int> holder = bus.SubscribeAsync<int>("refused", durable: "d");
            await holder.OpenAsync();
            RefusedException error = await Check.ThrowsAsync<RefusedException>(
                () => bus.SubscribeAsync<int>("refused", durable: "d").OpenAsync());
            Check.Equal("durable_in_use", error.Code);
            error = await Check.ThrowsAsync<RefusedException>(
                () => bus.HandleAsync<int>("refused", (_, __) => default, channels: new[] { "a..b" }));
            Check.Equal("bad_channel", error.Code);
            Check.Throws<ArgumentException>(() => bus.SubscribeAsync<int>("refused", byKey: true));
        }

        [Test]
        public static async Task CancellationEndsALoop()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            using CancellationTokenSource cancelled = new CancellationTokenSource();
            await bus.PublishAsync("cancel", 1);
            await Check.ThrowsAsync<OperationCanceledException>(async () =>
            {
                await foreach (Message<int> _ in bus.SubscribeAsync<int>("cancel", durable: "d", cancellationToken: cancelled.Token))
                    cancelled.CancelAfter(1); // The loop acknowledges and waits for the next message.
            });
            await bus.PublishAsync("cancel", 2);
            Check.Sequence(new[] { 2 }, await ReadAsync(bus.SubscribeAsync<int>("cancel", durable: "d"), 1));
        }

        [Test]
        public static async Task DrainEndsLoopsAndStoresAcks()
        {
            Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishManyAsync("drain", new[] { 1, 2, 3 });
            TaskCompletionSource<bool> second = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            TaskCompletionSource<bool> draining = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            Task loop = Task.Run(async () =>
            {
                await foreach (Message<int> message in bus.SubscribeAsync<int>("drain", durable: "d"))
                {
                    if (message.Value == 2)
                    {
                        second.SetResult(true);
                        await draining.Task;
                    }
                }
            });
            await second.Task;
            Task drained = bus.DrainAsync();
            Check.True(!drained.IsCompleted, "the drain waits for the loop");
            draining.SetResult(true);
            await drained;
            await loop;
            await bus.DisposeAsync();
            await using Bus other = await Bus.ConnectAsync(Runner.Url);
            Check.Sequence(new[] { 3 }, await ReadAsync(other.SubscribeAsync<int>("drain", durable: "d"), 1));
        }

        [Test]
        public static async Task RequestsGetTheirReplies()
        {
            await using Bus server = await Bus.ConnectAsync(Runner.Url);
            await using Bus client = await Bus.ConnectAsync(Runner.Url);
            await using MessageHandler handler = await server.HandleRequestsAsync<int, string>(
                "requests", (message, _) => new ValueTask<string>($"got {message.Value}"), concurrency: 8);
            string[] replies = await Task.WhenAll(
                Enumerable.Range(0, 100).Select(number => client.RequestAsync<int, string>("requests", number)));
            Check.Sequence(Enumerable.Range(0, 100).Select(number => $"got {number}"), replies);
            await Check.ThrowsAsync<TimeoutException>(
                () => client.RequestAsync<int, string>("nobody", 1, TimeSpan.FromMilliseconds(20)));
            await Check.ThrowsAsync<RefusedException>(() => client.RequestAsync<int, string>(
                "requests", 1, options: new PublishOptions { Channel = "a..b" }));
        }

        private static async Task<List<T>> ReadAsync<T>(Subscription<T> subscription, int count)
        {
            List<T> values = new List<T>();
            await foreach (Message<T> message in subscription)
            {
                values.Add(message.Value);
                if (values.Count == count)
                    break;
            }
            return values;
        }
    }
}
