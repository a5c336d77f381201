// A program that publishes shops, or prints the shops that others publish.
//
//   Shops publish HOST:PORT      publish N shops for each input line with a number N
//   Shops subscribe HOST:PORT    print the id of each received shop, until its input ends
//   Shops count HOST:PORT N      receive N shops, which must be in order, and print their rate
//
// Tests run this program and read its output, one fact per line. `count` accepts only first
// deliveries in order; `subscribe` accepts every message.

using System;
using System.Diagnostics;
using System.Threading;

namespace SimpleBus.Version1.Example
{
    public static class Shops
    {
        private static readonly TimeSpan Patience = TimeSpan.FromSeconds(20);

        public static int Main(string[] arguments)
        {
            if (arguments.Length < 2)
            {
                Console.Error.WriteLine("usage: Shops publish|subscribe|count HOST:PORT [N]");
                return 2;
            }
            int colon = arguments[1].LastIndexOf(':');
            ClientOptions options = new ClientOptions
            {
                Host = arguments[1].Substring(0, colon),
                Port = int.Parse(arguments[1].Substring(colon + 1)),
            };
            using (Version1Client bus = new Version1Client(options))
            {
                bus.Bind<ShopCreated>(ShopCreated.ClassId, ShopCreated.Encode, ShopCreated.Decode);
                bus.Connect(Patience);
                Console.WriteLine("session " + bus.SessionId);
                switch (arguments[0])
                {
                    case "publish": Publish(bus); return 0;
                    case "subscribe": Subscribe(bus); return 0;
                    case "count": return Count(bus, long.Parse(arguments[2]));
                    default: Console.Error.WriteLine("unknown mode: " + arguments[0]); return 2;
                }
            }
        }

        private static void Publish(Version1Client bus)
        {
            long next = 0;
            string line;
            while ((line = Console.ReadLine()) != null)
            {
                long end = next + long.Parse(line);
                for (; next < end; next++)
                    // A name may end in CR LF: only the whole delimiter may not be in a payload.
                    bus.Publish(new ShopCreated { Id = next, Name = "Shop " + next + "\r\n" });
                bus.Flush(Patience);
                Console.WriteLine("published " + next);
            }
        }

        private static void Subscribe(Version1Client bus)
        {
            // A line is written before the message counts as processed, so no acknowledged message
            // is missing from the output, even if the process is killed.
            bus.Subscribe<ShopCreated>(shop => Console.WriteLine(shop.Id));
            while (Console.ReadLine() != null) { }
        }

        private static int Count(Version1Client bus, long count)
        {
            long next = 0;
            string problem = null;
            Stopwatch clock = new Stopwatch();
            ManualResetEvent done = new ManualResetEvent(false);
            bus.Subscribe<ShopCreated>(shop =>
            {
                if (next == 0)
                    clock.Start();
                if (shop.Id != next || shop.Name != "Shop " + next + "\r\n")
                    problem = problem ?? "expected " + next + ", got " + shop.Id + ", " + shop.Name;
                next++;
                if (next == count || problem != null)
                    done.Set();
            });
            bool all = done.WaitOne(Patience);
            clock.Stop();
            if (!all || problem != null)
            {
                Console.WriteLine(problem ?? "only " + next + " arrived");
                return 1;
            }
            Console.WriteLine(
                "counted " + next + " in order, "
                + (long)(next / clock.Elapsed.TotalSeconds) + " a second");
            return 0;
        }
    }
}
