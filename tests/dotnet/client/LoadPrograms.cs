using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Text.Json;
using System.Threading.Tasks;

namespace SimpleBus.Client.Tests
{
    /// <summary>
    /// Timed programs of <c>load/dotnet_client.py</c>, with the same roles as <c>load/sdk_worker.py</c>.
    /// <code>
    /// ClientTests load JOB    runs a job, a JSON object; prints "ready" and at the end one line of JSON
    /// </code>
    /// Times are seconds of the monotonic clock, which all processes share.
    /// </summary>
    public static class LoadPrograms
    {
        private const int TargetClass = 1;
        private const int PublishedTogether = 20_000;

        public static async Task RunAsync(string argument)
        {
            JsonElement job = JsonDocument.Parse(argument).RootElement;
            int count = job.GetProperty("count").GetInt32();
            await using Bus bus = await Bus.ConnectAsync($"127.0.0.1:{job.GetProperty("port").GetInt32()}");
            Dictionary<string, double> found = job.GetProperty("role").GetString() switch
            {
                "publish" => await PublishAsync(bus, count, Payloads(job)),
                "publish_each" => await PublishEachAsync(bus, count, Payloads(job)),
                "receive_batches" => await ReceiveBatchesAsync(bus, count, Payloads(job)),
                "ask" => await AskAsync(bus, count, Payloads(job)),
                "answer" => await AnswerAsync(bus),
                string role => throw new ArgumentException($"unknown role {role}"),
            };
            Console.WriteLine(JsonSerializer.Serialize(found));
        }

        private static double Now() => Stopwatch.GetTimestamp() / (double)Stopwatch.Frequency;

        private static ReadOnlyMemory<byte>[] Payloads(JsonElement job)
        {
            byte[] block = File.ReadAllBytes(job.GetProperty("block").GetString());
            int size = job.GetProperty("size_bytes").GetInt32();
            return Enumerable.Range(0, block.Length / size)
                .Select(index => new ReadOnlyMemory<byte>(block, index * size, size)).ToArray();
        }

        private static async Task<Dictionary<string, double>> PublishAsync(
            Bus bus, int count, ReadOnlyMemory<byte>[] payloads)
        {
            double started = Now();
            List<Task> confirms = new List<Task>();
            for (int first = 0; first < count; first += PublishedTogether)
            {
                int begin = first;
                int length = Math.Min(PublishedTogether, count - first);
                confirms.Add(bus.PublishManyAsync(TargetClass, Part(payloads, begin, length)).AsTask());
            }
            await Task.WhenAll(confirms);
            return new Dictionary<string, double> { ["started"] = started, ["confirmed"] = Now() };
        }

        private static IEnumerable<ReadOnlyMemory<byte>> Part(ReadOnlyMemory<byte>[] payloads, int first, int length)
        {
            for (int number = first; number < first + length; number++)
                yield return payloads[number % payloads.Length];
        }

        private static async Task<Dictionary<string, double>> PublishEachAsync(
            Bus bus, int count, ReadOnlyMemory<byte>[] payloads)
        {
            double started = Now();
            for (int number = 0; number < count; number++)
                await bus.PublishAsync(TargetClass, payloads[number % payloads.Length]);
            return new Dictionary<string, double> { ["started"] = started, ["confirmed"] = Now() };
        }

        private static async Task<Dictionary<string, double>> ReceiveBatchesAsync(
            Bus bus, int count, ReadOnlyMemory<byte>[] payloads)
        {
            Subscription<byte[]> subscription = bus.SubscribeAsync<byte[]>(TargetClass);
            await subscription.OpenAsync();
            Console.WriteLine("ready");
            int number = 0;
            await foreach (MessageBatch batch in subscription.ReadBatchesAsync())
            {
                for (int index = 0; index < batch.Count; index++, number++)
                    if (!batch[index].Payload.Span.SequenceEqual(payloads[number % payloads.Length].Span))
                        throw new InvalidDataException($"message {number} has another payload");
                if (number == count)
                {
                    await batch.AckAsync();
                    break;
                }
            }
            await bus.DrainAsync();
            return new Dictionary<string, double> { ["settled"] = Now() };
        }

        private static async Task<Dictionary<string, double>> AskAsync(
            Bus bus, int count, ReadOnlyMemory<byte>[] payloads)
        {
            double[] seconds = new double[count];
            for (int number = 0; number < count; number++)
            {
                ReadOnlyMemory<byte> payload = payloads[number % payloads.Length];
                double begun = Now();
                byte[] reply = await bus.RequestAsync<ReadOnlyMemory<byte>, byte[]>(TargetClass, payload);
                seconds[number] = Now() - begun;
                if (!payload.Span.SequenceEqual(reply))
                    throw new InvalidDataException($"reply {number} has another payload");
            }
            Array.Sort(seconds);
            return new Dictionary<string, double>
            {
                ["p50_us"] = seconds[count / 2] * 1e6,
                ["p99_us"] = seconds[count * 99 / 100] * 1e6,
                ["max_us"] = seconds[count - 1] * 1e6,
            };
        }

        private static async Task<Dictionary<string, double>> AnswerAsync(Bus bus)
        {
            await using MessageHandler handler = await bus.HandleRequestsAsync<byte[], byte[]>(
                TargetClass, (message, _) => new ValueTask<byte[]>(message.Value));
            Console.WriteLine("ready");
            await handler.Completion; // Until the process is stopped.
            return new Dictionary<string, double>();
        }
    }
}
