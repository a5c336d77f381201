using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Security.Cryptography.X509Certificates;
using System.Threading;
using System.Threading.Tasks;

namespace SimpleBus.Client.Tests
{
    /// <summary>
    /// Programs that tests in Python control.
    /// <code>
    /// publish URL CLASS COUNT [FILE]    publishes 0 to COUNT - 1, some one by one and some together, or until the file
    ///                                   exists; then a message with their number. Prints "published COUNT"
    /// consume URL CLASS                 reads with a durable until it has all of them; prints "consumed COUNT", and how
    ///                                   many were stored twice
    /// connect URL KEY=VALUE…     publishes a message with user, password, token, ca, pfx and server; prints "confirmed",
    ///                            or "lost" and the code of the error
    /// </code>
    /// </summary>
    public static class Programs
    {
        private const int PartCount = 500;
        private const int ConcurrentCount = 100;

        public static async Task<int> RunAsync(string[] arguments)
        {
            if (arguments[0] == "connect")
            {
                await ConnectAsync(arguments[1], arguments.Skip(2).ToDictionary(
                    word => word.Split('=')[0], word => word.Substring(word.IndexOf('=') + 1)));
                return 0;
            }
            BusOptions options = new BusOptions
            {
                ReconnectTimeout = Timeout.InfiniteTimeSpan,
                Log = (level, text, error) => Console.Error.WriteLine($"{level}: {text}"),
            };
            options.Classes.Add(arguments[2]);
            await using Bus bus = await Bus.ConnectAsync(arguments[1], options);
            Console.WriteLine("connected");
            if (arguments[0] == "publish")
                await PublishAsync(bus, arguments[2], int.Parse(arguments[3]), arguments.ElementAtOrDefault(4));
            else
                await ConsumeAsync(bus, arguments[2]);
            return 0;
        }

        private static async Task ConnectAsync(string url, Dictionary<string, string> values)
        {
            BusOptions options = new BusOptions
            {
                User = values.GetValueOrDefault("user"),
                Password = values.GetValueOrDefault("password"),
                Token = values.GetValueOrDefault("token"),
                Tls = new TlsOptions
                {
                    CaFile = values.GetValueOrDefault("ca"),
                    ServerName = values.GetValueOrDefault("server"),
                    ClientCertificate = values.TryGetValue("pfx", out string? file)
                        ? new X509Certificate2(file, "pfx") : null,
                },
            };
            try
            {
                await using Bus bus = await Bus.ConnectAsync(url, options);
                await bus.PublishAsync("orders", 1);
                Console.WriteLine("confirmed");
            }
            catch (BusConnectionException error)
            {
                Console.Error.WriteLine(error);
                Console.WriteLine($"lost {error.Code}");
            }
        }

        private static async Task PublishAsync(Bus bus, string target, int count, string? stopFile)
        {
            int next = 0;
            while (next < count && !(stopFile != null && File.Exists(stopFile)))
            {
                List<Task> confirms = new List<Task>();
                int end = Math.Min(next + PartCount, count);
                confirms.Add(bus.PublishManyAsync(
                    target, Enumerable.Range(next, end - next).Select(BitConverter.GetBytes)).AsTask());
                next = end;
                for (int single = 0; single < ConcurrentCount && next < count; single++)
                    confirms.Add(bus.PublishAsync(target, BitConverter.GetBytes(next++)).AsTask());
                await Task.WhenAll(confirms);
                Console.WriteLine($"confirmed {next}");
                if (stopFile != null)
                    await Task.Delay(5);
            }
            await bus.PublishAsync(target, BitConverter.GetBytes((long)next));
            Console.WriteLine($"resent {bus.ResentCount}");
            Console.WriteLine($"published {next}");
        }

        private static async Task ConsumeAsync(Bus bus, string target)
        {
            List<long> sequenceOf = new List<long>();
            long expected = -1;
            int consumed = 0;
            int storedTwice = 0;
            await using Subscription<byte[]> subscription = bus.SubscribeAsync<byte[]>(target, durable: "kills");
            await foreach (MessageBatch batch in subscription.ReadBatchesAsync())
            {
                for (int index = 0; index < batch.Count; index++)
                {
                    ReadOnlyMemory<byte> payload = batch[index].Payload;
                    if (payload.Length == sizeof(long))
                    {
                        expected = BitConverter.ToInt64(payload.Span);
                        continue;
                    }
                    int number = BitConverter.ToInt32(payload.Span);
                    while (sequenceOf.Count <= number)
                        sequenceOf.Add(-1);
                    // A message that is delivered again keeps its sequence.
                    if (sequenceOf[number] < 0)
                        consumed++;
                    else if (sequenceOf[number] != batch[index].Sequence)
                        storedTwice++;
                    sequenceOf[number] = batch[index].Sequence;
                }
                if (consumed == expected)
                {
                    await batch.AckAsync();
                    break;
                }
            }
            Console.WriteLine($"consumed {consumed}");
            Console.WriteLine($"twice {storedTwice}");
        }
    }
}
