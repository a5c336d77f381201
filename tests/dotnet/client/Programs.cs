using System;
using System.Collections.Generic;
using System.Linq;
using System.Security.Cryptography.X509Certificates;
using System.Threading.Tasks;

namespace SimpleBus.Client.Tests
{
    /// <summary>
    /// Programs that tests in Python control.
    /// <code>
    /// publish URL CLASS COUNT    publishes 0 to COUNT - 1, some one by one and some together; prints "published COUNT"
    /// consume URL CLASS COUNT    reads with a durable until it has all numbers; prints "consumed COUNT" and what was
    ///                            stored twice
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
                ReconnectTimeout = TimeSpan.FromSeconds(60),
                Log = (level, text, error) => Console.Error.WriteLine($"{level}: {text}"),
            };
            options.Classes.Add(arguments[2]);
            await using Bus bus = await Bus.ConnectAsync(arguments[1], options);
            Console.WriteLine("connected");
            int count = int.Parse(arguments[3]);
            if (arguments[0] == "publish")
                await PublishAsync(bus, arguments[2], count);
            else
                await ConsumeAsync(bus, arguments[2], count);
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

        private static async Task PublishAsync(Bus bus, string target, int count)
        {
            int reported = 0;
            for (int next = 0; next < count;)
            {
                List<Task> confirms = new List<Task>();
                int end = Math.Min(next + PartCount, count);
                confirms.Add(bus.PublishManyAsync(
                    target, Enumerable.Range(next, end - next).Select(BitConverter.GetBytes)).AsTask());
                next = end;
                for (int single = 0; single < ConcurrentCount && next < count; single++)
                    confirms.Add(bus.PublishAsync(target, BitConverter.GetBytes(next++)).AsTask());
                await Task.WhenAll(confirms);
                if (next / 10_000 > reported)
                    Console.WriteLine($"confirmed {next}");
                reported = next / 10_000;
            }
            Console.WriteLine($"resent {bus.ResentCount}");
            Console.WriteLine($"published {count}");
        }

        private static async Task ConsumeAsync(Bus bus, string target, int count)
        {
            Dictionary<int, long> sequenceOf = new Dictionary<int, long>();
            int storedTwice = 0;
            await using Subscription<byte[]> subscription = bus.SubscribeAsync<byte[]>(target, durable: "kills");
            await foreach (MessageBatch batch in subscription.ReadBatchesAsync())
            {
                for (int index = 0; index < batch.Count; index++)
                {
                    int number = BitConverter.ToInt32(batch[index].Payload.Span);
                    // A message that is delivered again keeps its sequence.
                    if (sequenceOf.TryGetValue(number, out long sequence) && sequence != batch[index].Sequence)
                        storedTwice++;
                    sequenceOf[number] = batch[index].Sequence;
                }
                if (sequenceOf.Count == count)
                {
                    await batch.AckAsync();
                    break;
                }
            }
            Console.WriteLine($"consumed {sequenceOf.Count}");
            Console.WriteLine($"twice {storedTwice}");
        }
    }
}
