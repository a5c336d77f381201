using System;
using System.Collections.Generic;
using System.Linq;
using System.Text;
using System.Threading;
using System.Threading.Tasks;

namespace SimpleBus.Client.Tests
{
    /// <summary>Publishing to a live server, without journal.</summary>
    public static class PublishTests
    {
        [Test]
        public static async Task PublishesWithConfirm()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            Confirm confirm = await bus.PublishAsync("publish-one", Encoding.UTF8.GetBytes("hi"));
            Check.Equal(Durability.Memory, confirm.Durability);
            Check.True(bus.IsConnected, "the bus is connected");
        }

        [Test]
        public static async Task PublishesConcurrentlyInOrder()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            // The first calls name the class.
            List<Task<Confirm>> confirms = new List<Task<Confirm>>();
            for (int number = 0; number < 20_000; number++)
                confirms.Add(bus.PublishAsync("publish-order", number).AsTask());
            await Task.WhenAll(confirms);
            int next = 0;
            await foreach (Message<int> message in bus.SubscribeAsync<int>("publish-order"))
            {
                Check.Equal(next++, message.Value);
                if (next == confirms.Count)
                    break;
            }
        }

        [Test]
        public static async Task PublishesManyWithBackPressure()
        {
            BusOptions options = new BusOptions { UnconfirmedBytesMax = 10_000 };
            await using Bus bus = await Bus.ConnectAsync(Runner.Url, options);
            byte[][] payloads = Enumerable.Range(0, 50_000).Select(BitConverter.GetBytes).ToArray();
            ValueTask<Confirm> all = bus.PublishManyAsync("publish-many", payloads);
            Confirm last = await bus.PublishAsync("publish-many", BitConverter.GetBytes(50_000));
            await all;
            await bus.FlushAsync();
            Check.Equal(Durability.Memory, last.Durability);
            int next = 0;
            await foreach (Message<byte[]> message in bus.SubscribeAsync<byte[]>("publish-many"))
            {
                Check.Equal(next, BitConverter.ToInt32(message.Value));
                if (next++ == 50_000)
                    break;
            }
        }

        [Test]
        public static async Task CarriesMetadataAndAnyPayload()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            byte[] payload = Encoding.ASCII.GetBytes("<\r\n><\r\n>\0<\r\n");
            PublishOptions options = new PublishOptions
            {
                Channel = "a.b",
                Key = new byte[] { 1, 2 },
                PublishedAt = DateTimeOffset.FromUnixTimeMilliseconds(1234567),
                Expires = TimeSpan.FromSeconds(60),
            };
            options.Headers.Add(new KeyValuePair<string, string>("trace", "7<\r\n>"));
            await bus.PublishAsync("metadata", payload, options);
            await bus.PublishAsync("metadata", payload);
            List<Message<byte[]>> got = new List<Message<byte[]>>();
            await foreach (Message<byte[]> message in bus.SubscribeAsync<byte[]>("metadata"))
            {
                Check.Sequence(payload, message.Value);
                got.Add(message);
                if (got.Count == 2)
                    break;
            }
            Check.Equal("a.b", got[0].Channel);
            Check.Sequence(new byte[] { 1, 2 }, got[0].Key.ToArray());
            Check.Equal("7<\r\n>", got[0].GetHeader("trace"));
            Check.Equal(options.PublishedAt, got[0].PublishedAt);
            Check.Equal((string?)null, got[1].Channel);
            Check.Equal(1, got[0].Attempt);
            Check.Equal(got[0].Sequence + 1, got[1].Sequence);
        }

        [Test]
        public static Task RoundsTimesUpToMilliseconds()
        {
            foreach ((long ticks, ulong milliseconds) in new[] { (0L, 0UL), (1L, 1UL), (10_000L, 1UL), (10_001L, 2UL) })
            {
                PublishOptions options = new PublishOptions { Expires = new TimeSpan(ticks), Delay = new TimeSpan(ticks) };
                Check.Equal<ulong?>(milliseconds, options.ToEnvelope().ExpiresMilliseconds);
                Check.Equal<ulong?>(milliseconds, options.ToEnvelope().NotBeforeMilliseconds);
            }
            return Task.CompletedTask;
        }

        [Test]
        public static async Task ReportsRefusedMessages()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            PublishOptions illegal = new PublishOptions { Channel = "a..b" };
            Task<Confirm> before = bus.PublishAsync("refusals", 1).AsTask();
            Task<Confirm> refused = bus.PublishAsync("refusals", 2, illegal).AsTask();
            Task<Confirm> after = bus.PublishAsync("refusals", 3).AsTask();
            RefusedException error = await Check.ThrowsAsync<RefusedException>(() => refused);
            Check.Equal("bad_channel", error.Code);
            await before;
            await after;
            error = await Check.ThrowsAsync<RefusedException>(
                () => bus.PublishManyAsync("refusals", Enumerable.Range(0, 3000), illegal).AsTask());
            Check.Equal(3000, error.RefusedCount);
        }

        [Test]
        public static async Task ReportsMessagesThatAreRefusedBeforeTheLastIsQueued()
        {
            BusOptions options = new BusOptions { UnconfirmedBytesMax = 10_000 };
            await using Bus bus = await Bus.ConnectAsync(Runner.Url, options);
            PublishOptions illegal = new PublishOptions { Channel = "a..b" };
            RefusedException error = await Check.ThrowsAsync<RefusedException>(
                () => bus.PublishManyAsync("refusals", Enumerable.Range(0, 30_000), illegal).AsTask());
            Check.Equal(30_000, error.RefusedCount);
        }

        [Test]
        public static async Task RefusesTooLongMessagesItself()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            byte[] payload = new byte[(1 << 20) - 13];
            await bus.PublishAsync("long", payload);
            Check.Throws<ArgumentException>(() => bus.PublishAsync("long", new byte[payload.Length + 1]));
            await Check.ThrowsAsync<ArgumentException>(
                () => bus.PublishManyAsync("long", new[] { new byte[payload.Length + 1] }).AsTask());
            await bus.PublishAsync("long", 1);
        }

        [Test]
        public static async Task CancellationEndsWaiting()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url);
            using CancellationTokenSource cancelled = new CancellationTokenSource();
            cancelled.Cancel();
            await Check.ThrowsAsync<OperationCanceledException>(
                () => bus.PublishAsync("cancelled", 1, cancellationToken: cancelled.Token).AsTask());
            await Check.ThrowsAsync<OperationCanceledException>(() => Bus.ConnectAsync(Runner.Url, null, cancelled.Token));
        }

        [Test]
        public static async Task ADisposedBusRaises()
        {
            Bus bus = await Bus.ConnectAsync(Runner.Url);
            await bus.PublishAsync("disposed", 1);
            await bus.DisposeAsync();
            await bus.DisposeAsync();
            await Check.ThrowsAsync<ObjectDisposedException>(async () => await bus.PublishAsync("disposed", 1));
            await Check.ThrowsAsync<ObjectDisposedException>(() => bus.SubscribeAsync<int>("disposed").OpenAsync());
        }

        [Test]
        public static async Task ChecksItsSettings()
        {
            TimeSpan negative = TimeSpan.FromMilliseconds(-2);
            (string, BusOptions)[] wrong =
            {
                ("UnconfirmedBytesMax", new BusOptions { UnconfirmedBytesMax = 0 }),
                ("ConnectTimeout", new BusOptions { ConnectTimeout = TimeSpan.Zero }),
                ("ReconnectTimeout", new BusOptions { ReconnectTimeout = negative }),
                ("Heartbeat", new BusOptions { Heartbeat = negative }),
                ("Heartbeat", new BusOptions { Heartbeat = TimeSpan.FromHours(1.1) }),
                ("CloseTimeout", new BusOptions { CloseTimeout = negative }),
                ("CloseTimeout", new BusOptions { CloseTimeout = TimeSpan.MaxValue }),
            };
            foreach ((string name, BusOptions options) in wrong)
            {
                ArgumentOutOfRangeException error = await Check.ThrowsAsync<ArgumentOutOfRangeException>(
                    () => Bus.ConnectAsync(Runner.Url, options));
                Check.Equal(name, error.ParamName);
                Check.True(error.Message.Contains("expected"), $"{error.Message} contains the expected value");
            }
        }

        [Test]
        public static async Task UsesTheSettingsOfItsConnect()
        {
            BusOptions options = new BusOptions { Heartbeat = Timeout.InfiniteTimeSpan };
            await using Bus bus = await Bus.ConnectAsync(Runner.Url, options);
            options.UnconfirmedBytesMax = 0; // Publishing would wait for ever.
            await bus.PublishAsync("settings", 1);
        }

        [Test]
        public static async Task ConnectsToOneOfSeveralAddresses()
        {
            await using Bus bus = await Bus.ConnectAsync(new[] { "127.0.0.1:1", Runner.Url });
            await bus.PublishAsync("addresses", 1);
            BusConnectionException error = await Check.ThrowsAsync<BusConnectionException>(
                () => Bus.ConnectAsync("simplebus://127.0.0.1:1"));
            Check.Equal((string?)null, error.Code);
            Check.Throws<ArgumentException>(() => Bus.ConnectAsync("http://127.0.0.1").GetAwaiter().GetResult());
        }

        [Test]
        public static async Task ANameIsUsedByOneProgramAtATime()
        {
            await using Bus bus = await Bus.ConnectAsync(Runner.Url, new BusOptions { Name = "till-4" });
            BusOptions options = new BusOptions { Name = "till-4", Heartbeat = TimeSpan.FromMilliseconds(10) };
            BusConnectionException error = await Check.ThrowsAsync<BusConnectionException>(
                () => Bus.ConnectAsync(Runner.Url, options));
            Check.Equal("name_in_use", error.Code);
        }

        [Test]
        public static async Task ConnectsWhenThePreviousRunHasEnded()
        {
            Bus previous = await Bus.ConnectAsync(Runner.Url, new BusOptions { Name = "till-5" });
            TaskCompletionSource<bool> refused = new TaskCompletionSource<bool>(TaskCreationOptions.RunContinuationsAsynchronously);
            BusOptions options = new BusOptions { Name = "till-5" };
            options.Log = (_, text, __) =>
            {
                if (text.StartsWith("name_in_use", StringComparison.Ordinal))
                    refused.TrySetResult(true);
            };
            Task<Bus> connecting = Bus.ConnectAsync(Runner.Url, options);
            await refused.Task;
            await previous.DisposeAsync();
            await using Bus bus = await connecting;
            Check.True(bus.IsConnected, "the name is free");
        }
    }
}
