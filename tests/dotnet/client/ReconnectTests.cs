using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Tests
{
    /// <summary>Lost connections, numbers and credit, at a server that sends only the frames that the test decides.</summary>
    public static class ReconnectTests
    {
        [Test]
        public static async Task ResendsFromTheNumberThatTheServerExpects()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            Task<Confirm>[] confirms = Publish(bus, 4);
            Check.Sequence(new uint[] { 0, 1, 2, 3 }, await NumbersAsync(server, 4));
            server.Send(FrameType.Confirm, b: 1, c: 2);
            Check.Equal(Durability.Disk, (await confirms[0]).Durability);
            server.Disconnect();
            string connect = await server.AcceptAsync(next: 3);
            Check.True(connect.Contains("\"unconfirmed\":1,\"bus\":\"b\""), $"{connect} contains the lowest unconfirmed number");
            Check.True(connect.Contains("\"classes\":[1]"), $"{connect} names the class");
            // Numbers 1 and 2 are stored.
            await Task.WhenAll(confirms.Take(3));
            Check.Sequence(new uint[] { 3 }, await NumbersAsync(server, 1));
            server.Send(FrameType.Confirm, b: 4);
            await confirms[3];
            Check.Equal(1L, bus.ResentCount);
            await CloseAsync(bus, server);
        }

        [Test]
        public static async Task AWrongReadOfAConfirmLeavesOthersAlone()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            ValueTask<Confirm> first = bus.PublishAsync(1, new byte[1]);
            Check.Throws<InvalidOperationException>(() => first.GetAwaiter().GetResult()); // It would have to block.
            ValueTask<Confirm> second = bus.PublishAsync(1, new byte[1]);
            await NumbersAsync(server, 2);
            server.Send(FrameType.Confirm, b: 1);
            await first;
            Check.Throws<InvalidOperationException>(() => first.GetAwaiter().GetResult()); // A second read.
            Check.True(!second.IsCompleted, "the second message is not confirmed");
            server.Send(FrameType.Confirm, b: 2);
            await second;
            await CloseAsync(bus, server);
        }

        [Test]
        public static async Task RenumbersForAnotherBus()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            Task<Confirm>[] confirms = Publish(bus, 3);
            Check.Sequence(new uint[] { 0, 1, 2 }, await NumbersAsync(server, 3));
            server.Send(FrameType.Confirm, b: 1);
            await confirms[0];
            server.Disconnect();
            await server.AcceptAsync(bus: "other", next: 0x7FFF_FFFF);
            Check.Sequence(new uint[] { 0x7FFF_FFFF, 0 }, await NumbersAsync(server, 2));
            server.Send(FrameType.Confirm, b: 1);
            await Task.WhenAll(confirms);
            await CloseAsync(bus, server);
        }

        [Test]
        public static async Task StaysWithinTheCredit()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server, credit: 2 * (Frame.Overhead + 1));
            Task<Confirm>[] confirms = Publish(bus, 5);
            Check.Sequence(new uint[] { 0, 1 }, await NumbersAsync(server, 2));
            await SyncAsync(bus, server); // No other message was sent before this request.
            server.Send(FrameType.Confirm, b: 1);
            Check.Sequence(new uint[] { 2 }, await NumbersAsync(server, 1));
            server.Send(FrameType.Confirm, b: 3);
            Check.Sequence(new uint[] { 3, 4 }, await NumbersAsync(server, 2));
            server.Send(FrameType.Confirm, b: 5);
            await Task.WhenAll(confirms);
            await CloseAsync(bus, server);
        }

        [Test]
        public static async Task AFatalErrorEndsTheBusWithItsCode()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            Task<Confirm>[] confirms = Publish(bus, 2);
            Subscription<int> subscription = bus.SubscribeAsync<int>(1);
            Task opening = subscription.OpenAsync();
            await NumbersAsync(server, 2);
            server.Send(FrameType.Error, content: "{\"code\":\"taken_over\",\"message\":\"m\",\"fatal\":true}");
            foreach (Task waiting in confirms.Append(opening))
                Check.Equal("taken_over", (await Check.ThrowsAsync<BusConnectionException>(() => waiting)).Code);
            Check.Equal(
                "taken_over",
                (await Check.ThrowsAsync<BusConnectionException>(async () => await bus.PublishAsync(1, 1))).Code);
            await bus.DisposeAsync();
        }

        [Test]
        public static async Task ReconnectsToAServerThatIsSilent()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server, heartbeat: 0.05);
            while ((await server.ReadAsync()).Type != FrameType.Heartbeat)
            {
            }
            await server.AcceptAsync(); // The silence has ended the first connection.
            await CloseAsync(bus, server);
        }

        [Test]
        public static async Task SendsNoMessageToADrainingServer()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            server.Send(FrameType.Error, content: "{\"code\":\"draining\",\"message\":\"m\",\"fatal\":false}");
            await SyncAsync(bus, server); // The Error was processed.
            Task<Confirm>[] confirms = Publish(bus, 1);
            server.Disconnect();
            await server.AcceptAsync();
            Check.Sequence(new uint[] { 0 }, await NumbersAsync(server, 1));
            Check.Equal(0L, bus.ResentCount);
            server.Send(FrameType.Confirm, b: 1);
            await confirms[0];
            await CloseAsync(bus, server);
        }

        [Test]
        public static async Task WaitsForADurableThatTheOldConnectionHolds()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            Task opening = bus.SubscribeAsync<int>(1, durable: "d").OpenAsync();
            const string request = "{\"durable\":\"d\",\"start\":\"waiting\"}";
            await SubscribedAsync(server, request, cursor: 0);
            await opening;
            server.Disconnect();
            await server.AcceptAsync();
            await RefuseAsync();
            server.Disconnect(); // The client reconnects while it waits.
            await server.AcceptAsync();
            await RefuseAsync();
            await RefuseAsync();
            await SubscribedAsync(server, request, cursor: 0);
            await SyncAsync(bus, server);
            server.Dispose();
            await bus.Connection.CloseAsync();

            async Task RefuseAsync()
            {
                (byte type, _, uint number, _, _) = await server.ReadAsync();
                Check.Equal(FrameType.Subscribe, type);
                server.Send(
                    FrameType.Error, 0, number, FrameType.Subscribe, "{\"code\":\"durable_in_use\",\"message\":\"m\"}");
            }
        }

        [Test]
        public static async Task ADrainOfASilentServerCanBeCancelled()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            Task opening = bus.SubscribeAsync<int>(1).OpenAsync();
            await SubscribedAsync(server, "{\"start\":\"waiting\"}", cursor: 0);
            await opening;
            using CancellationTokenSource cancelled = new CancellationTokenSource();
            Task draining = bus.DrainAsync(cancelled.Token);
            Check.Equal(FrameType.Unsubscribe, (await server.ReadAsync()).Type); // It gets no reply.
            cancelled.Cancel();
            await Check.ThrowsAsync<OperationCanceledException>(() => draining);
            server.Dispose();
            await bus.Connection.CloseAsync();
        }

        [Test]
        public static async Task ADrainWithoutAConnectionReportsDroppedAcks()
        {
            using FakeServer server = new FakeServer();
            TaskCompletionSource<bool> lost = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            Bus bus = await ConnectAsync(server, log: text =>
            {
                if (text.StartsWith("connection lost", StringComparison.Ordinal))
                    lost.TrySetResult(true);
            });
            TaskCompletionSource<bool> began = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            Task<MessageHandler> handling = bus.HandleAsync<byte[]>(1, async (_, __) =>
            {
                began.SetResult(true);
                await lost.Task;
            });
            await SubscribedAsync(server, "{\"start\":\"waiting\"}", cursor: 5);
            await handling;
            server.Send(FrameType.Deliver, 1, 1, 1);
            server.Send(FrameType.Message, 1, 5, 0, "x");
            await began.Task;
            Task draining = bus.DrainAsync();
            server.Disconnect();
            await (await handling).Completion;
            await server.AcceptAsync();
            (byte type, _, uint request, _, _) = await server.ReadAsync();
            Check.Equal(FrameType.Inquire, type);
            server.Send(FrameType.Inquire, b: request, content: "{\"about\":\"acks\"}");
            BusConnectionException error = await Check.ThrowsAsync<BusConnectionException>(() => draining);
            Check.True(error.Message.StartsWith("1 acknowledgements were not sent", StringComparison.Ordinal), error.Message);
            server.Dispose();
            await bus.Connection.CloseAsync();
        }

        [Test]
        public static async Task TheConnectionKeepsNoContextOfItsCaller()
        {
            using FakeServer server = new FakeServer();
            AsyncLocal<string?> context = new AsyncLocal<string?> { Value = "caller" };
            TaskCompletionSource<string?> seen = new TaskCompletionSource<string?>(TaskCreationOptions.RunContinuationsAsynchronously);
            Bus bus = await ConnectAsync(server, log: text =>
            {
                if (text.StartsWith("connection lost", StringComparison.Ordinal))
                    seen.TrySetResult(context.Value);
            });
            server.Disconnect();
            Check.Equal(null, await seen.Task);
            server.Dispose();
            await bus.Connection.CloseAsync();
        }

        [Test]
        public static async Task AHandlerThatDoesNotEndLeavesTimeForConfirms()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server, log: text =>
            {
                if (text.StartsWith("the bus did not drain", StringComparison.Ordinal))
                    server.Send(FrameType.Confirm, b: 1);
            });
            TaskCompletionSource<bool> began = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            TaskCompletionSource<bool> ended = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            Task<MessageHandler> handling = bus.HandleAsync<byte[]>(1, async (_, __) =>
            {
                began.SetResult(true);
                await ended.Task;
            });
            await SubscribedAsync(server, "{\"start\":\"waiting\"}", cursor: 5);
            await handling;
            server.Send(FrameType.Deliver, 1, 1, 1);
            server.Send(FrameType.Message, 1, 5, 0, "x");
            await began.Task;
            Task<Confirm> confirm = Publish(bus, 1)[0];
            Check.Sequence(new uint[] { 0 }, await NumbersAsync(server, 1));
            await CloseAsync(bus, server);
            await confirm;
            ended.SetResult(true);
            await (await handling).Completion;
        }

        [Test]
        public static async Task TheTimeoutOfARequestIncludesAReconnect()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            server.Disconnect();
            await Check.ThrowsAsync<TimeoutException>(
                () => bus.RequestAsync<int, int>(1, 1, TimeSpan.FromMilliseconds(20)));
            await Check.ThrowsAsync<ArgumentOutOfRangeException>(
                () => bus.RequestAsync<int, int>(1, 1, TimeSpan.FromSeconds(-1)));
            server.Dispose();
            await bus.Connection.CloseAsync();
        }

        [Test]
        public static async Task SubscribesAgainWhereItWas()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            await using IAsyncEnumerator<Message<byte[]>> plain =
                bus.SubscribeAsync<byte[]>(1, start: StartPosition.New).GetAsyncEnumerator();
            ValueTask<bool> next = plain.MoveNextAsync();
            await SubscribedAsync(server, "{\"start\":\"new\"}", cursor: 5);
            server.Send(FrameType.Deliver, 1, 1, 1);
            server.Send(FrameType.Message, 1, 5, 0, "x");
            Check.True(await next, "a message arrived");
            Check.Equal(5L, plain.Current.Sequence);
            server.Disconnect();
            await server.AcceptAsync();
            await SubscribedAsync(server, "{\"start\":{\"sequence\":6}}", cursor: 6);
            // The redelivery of a message that is being processed is dropped.
            server.Send(FrameType.Deliver, 1, 2, 1);
            server.Send(FrameType.Message, 1, 5, 0, "x");
            server.Send(FrameType.Deliver, 1, 1, 1);
            server.Send(FrameType.Message, 1, 6, 0, "y");
            await SyncAsync(bus, server); // The redeliveries were processed before 5 is acknowledged.
            Check.True(await plain.MoveNextAsync(), "a message arrived");
            Check.Equal(6L, plain.Current.Sequence);
            (byte type, ushort number, _, _, string range) = await server.ReadAsync();
            Check.Equal((FrameType.Ack, (ushort)1, "5-6"), (type, number, range));
            server.Disconnect();
            // The ack of sequence 6 is not sent, because a new server process may have assigned 6 to another message.
            await server.AcceptAsync(run: "s");
            await SubscribedAsync(server, "{\"start\":{\"sequence\":7}}", cursor: 6);
            next = plain.MoveNextAsync();
            server.Send(FrameType.Deliver, 1, 1, 1);
            server.Send(FrameType.Message, 1, 6, 0, "z");
            Check.True(await next, "a message arrived");
            Check.Equal("z", System.Text.Encoding.ASCII.GetString(plain.Current.Value));
            server.Dispose();
            await bus.Connection.CloseAsync();
        }

        [Test]
        public static async Task DropsRedeliveriesOfUnreadMessages()
        {
            using FakeServer server = new FakeServer();
            Bus bus = await ConnectAsync(server);
            await using IAsyncEnumerator<Message<byte[]>> messages =
                bus.SubscribeAsync<byte[]>(1, autoAck: false, start: StartPosition.New).GetAsyncEnumerator();
            ValueTask<bool> next = messages.MoveNextAsync();
            await SubscribedAsync(server, "{\"start\":\"new\"}", cursor: 5);
            await DeliverAsync(1, 5, 6, 7);
            List<long> sequences = new List<long>();
            Check.True(await next, "a message arrived");
            sequences.Add(messages.Current.Sequence);
            await DeliverAsync(2, 5, 6, 7, 8); // Only 5 is read, so only 5 is redelivered.
            await ReadNextAsync();
            await DeliverAsync(2, 6, 7, 8, 9);
            for (int count = 0; count < 5; count++)
                await ReadNextAsync();
            Check.Sequence(new long[] { 5, 6, 7, 5, 8, 6, 9 }, sequences);
            server.Dispose();
            await bus.Connection.CloseAsync();

            async Task DeliverAsync(uint attempt, params uint[] ids)
            {
                server.Send(FrameType.Deliver, 1, attempt, 1);
                foreach (uint id in ids)
                    server.Send(FrameType.Message, 1, id, 0, "x");
                await SyncAsync(bus, server);
            }

            async Task ReadNextAsync()
            {
                Check.True(await messages.MoveNextAsync(), "a message arrived");
                sequences.Add(messages.Current.Sequence);
            }
        }

        [Test]
        public static Task DelaysBetweenRoundsGrow()
        {
            ReconnectSchedule schedule = new ReconnectSchedule(2);
            Check.Equal((0, 0.0), schedule.NextAttempt(0));
            Check.Equal((1, 0.0), schedule.NextAttempt(0));
            Check.Equal((0, 0.05), schedule.NextAttempt(0));
            Check.Equal((1, 0.0), schedule.NextAttempt(0));
            schedule.MarkConnected();
            schedule.MarkLost(connectedSeconds: 1);
            Check.Equal((1, 0.1), schedule.NextAttempt(0));
            Check.Equal((0, 0.0), schedule.NextAttempt(0));
            Check.Equal((1, 0.1), schedule.NextAttempt(1)); // Half of the delay.
            schedule.MarkConnected();
            schedule.MarkLost(connectedSeconds: ReconnectSchedule.StableSeconds);
            Check.Equal((1, 0.0), schedule.NextAttempt(0));
            for (int attempt = 0; attempt < 40; attempt++)
                schedule.NextAttempt(0);
            Check.Equal(
                ReconnectSchedule.DelayMaxSeconds,
                Math.Max(schedule.NextAttempt(0).DelaySeconds, schedule.NextAttempt(0).DelaySeconds));
            return Task.CompletedTask;
        }

        private static async Task<Bus> ConnectAsync(
            FakeServer server, long credit = 1 << 20, double heartbeat = 0, Action<string>? log = null)
        {
            BusOptions options = new BusOptions
            {
                CloseTimeout = TimeSpan.FromSeconds(2),
                Log = (_, text, __) => log?.Invoke(text),
            };
            options.Classes.Add(1);
            Task<Bus> connecting = Bus.ConnectAsync(server.Url, options);
            await server.AcceptAsync(credit: credit, heartbeat: heartbeat);
            await server.NameClassAsync();
            return await connecting;
        }

        private static Task<Confirm>[] Publish(Bus bus, int count) =>
            Enumerable.Range(0, count).Select(number => bus.PublishAsync(1, new byte[] { (byte)number }).AsTask()).ToArray();

        private static async Task<List<uint>> NumbersAsync(FakeServer server, int count)
        {
            List<uint> numbers = new List<uint>();
            while (numbers.Count < count)
            {
                (byte type, _, uint number, _, _) = await server.ReadAsync();
                if (type == FrameType.Message)
                    numbers.Add(number);
            }
            return numbers;
        }

        /// <summary>Wait until the client has processed all sent frames. Its only other frame is a request.</summary>
        private static async Task SyncAsync(Bus bus, FakeServer server)
        {
            Task sync = bus.Connection.SyncAcksAsync(default);
            (byte type, _, uint request, _, _) = await server.ReadAsync();
            Check.Equal(FrameType.Inquire, type);
            server.Send(FrameType.Inquire, b: request, content: "{\"about\":\"acks\"}");
            await sync;
        }

        private static async Task SubscribedAsync(FakeServer server, string content, long cursor)
        {
            (byte type, _, uint request, ushort number, string received) = await server.ReadAsync();
            Check.Equal((FrameType.Subscribe, content), (type, received));
            server.Send(
                FrameType.Subscribe, 1, request, number, $"{{\"cursor\":{cursor},\"floor\":{cursor},\"resumed\":false}}");
        }

        private static async Task CloseAsync(Bus bus, FakeServer server)
        {
            ValueTask closing = bus.DisposeAsync();
            while (!closing.IsCompleted)
            {
                // The server closes when it has read all bytes.
                try
                {
                    await server.ReadAsync();
                }
                catch (Exception)
                {
                    server.Disconnect();
                    break;
                }
            }
            await closing;
        }
    }
}
