// Program that the tests run to check the client, beside its example.
//
// It reads its input as lines and prints the results of the client as lines. The tests, in Python,
// compare them with the expected results.
//
//   Checks bytes                   answers lines: frame, stream, group, encode, decode, publish
//   Checks faulty HOST:PORT        prints each id; another handler throws on 5 and 7, once each
//   Checks echo HOST:PORT          publishes each shop again, once, from the handler that receives it
//   Checks quiet HOST:PORT         sends only heartbeats, every fifth of a second
//   Checks patient HOST:PORT       prints each id; acknowledges after up to a minute
//   Checks two HOST:PORT           classes 1 and 2, two handlers each; prints what each one receives

using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Threading;
using SimpleBus.Version1;
using SimpleBus.Version1.Example;

public static class Checks
{
    public static int Main(string[] arguments)
    {
        if (arguments[0] == "bytes")
        {
            string line;
            while ((line = Console.ReadLine()) != null)
                Console.WriteLine(Answer(line.Split(' ')));
            return 0;
        }
        int colon = arguments[1].LastIndexOf(':');
        ClientOptions options = new ClientOptions
        {
            Host = arguments[1].Substring(0, colon),
            Port = int.Parse(arguments[1].Substring(colon + 1)),
        };
        if (arguments[0] == "quiet")
            options.HeartbeatSeconds = 0.2;
        if (arguments[0] == "patient")
            options.AckSeconds = 60;
        using (Version1Client bus = new Version1Client(options))
        {
            bus.Bind<ShopCreated>(1, ShopCreated.Encode, ShopCreated.Decode);
            switch (arguments[0])
            {
                case "faulty": Faulty(bus); break;
                case "echo": Echo(bus); break;
                case "patient": bus.Subscribe(1, d => Console.WriteLine(d.MessageId)); break;
                case "two": Two(bus); break;
            }
            bus.Connect(TimeSpan.FromSeconds(20));
            Console.WriteLine("session " + bus.SessionId);
            while (Console.ReadLine() != null) { }
        }
        Console.WriteLine("closed");
        return 0;
    }

    private static void Faulty(Version1Client bus)
    {
        HashSet<long> failed = new HashSet<long>();
        bus.Subscribe<ShopCreated>(shop =>
        {
            if ((shop.Id == 5 || shop.Id == 7) && failed.Add(shop.Id))
                throw new InvalidOperationException("the handler rejects shop " + shop.Id);
        });
        bus.Subscribe<ShopCreated>(shop => Console.WriteLine(shop.Id));
    }

    private static void Echo(Version1Client bus)
    {
        string echo = new string('e', 100);
        bus.Subscribe<ShopCreated>(shop =>
        {
            if (shop.Name != echo)
                bus.Publish(new ShopCreated { Id = shop.Id, Name = echo });
            else
                Console.WriteLine("echoed");
        });
    }

    private static void Two(Version1Client bus)
    {
        bus.Bind(2);
        foreach (ushort classId in new ushort[] { 1, 2 })
            foreach (string name in new[] { "first", "second" })
                bus.Subscribe(classId, delivery =>
                    Console.WriteLine(
                        name + " " + delivery.ClassId + " " + delivery.MessageId + " "
                        + Hex(delivery.Payload)));
    }

    // Bytes --------------------------------------------------------------------------------------

    private static string Answer(string[] words)
    {
        switch (words[0])
        {
            case "frame": return Written(words);
            case "stream": return Split(File.ReadAllBytes(words[1]), int.Parse(words[2]));
            case "group": return Grouped(words.Skip(1));
            case "encode": return Hex(ShopCreated.Encode(
                new ShopCreated { Id = long.Parse(words[1]), Name = Text(words[2]) }));
            case "decode": return Tried(() => Decoded(words[1]));
            case "publish": return Tried(() => Published(ushort.Parse(words[1]), words[2]));
            default: throw new ArgumentException(words[0]);
        }
    }

    /// <summary>Return the bytes of a frame, for `frame TYPE CLASS ID TIMER CONTENT`.</summary>
    private static string Written(string[] words)
    {
        ByteBuffer buffer = new ByteBuffer(1);
        Frames.Write(
            buffer, byte.Parse(words[1]), ushort.Parse(words[2]), uint.Parse(words[3]),
            ushort.Parse(words[4]), new ArraySegment<byte>(Bytes(words[5])));
        return Hex(new ArraySegment<byte>(buffer.Bytes, 0, buffer.Count));
    }

    /// <summary>Return the frames of a stream that arrives in chunks of this size, and the number
    /// of bytes left. The limit of a frame is the protocol's.</summary>
    private static string Split(byte[] stream, int chunk)
    {
        FrameReader reader = new FrameReader(1024 * 1024);
        List<string> found = new List<string>();
        Frame frame;
        int at = 0;
        while (true)
        {
            while (reader.Next(out frame))
                found.Add(string.Join(
                    " ", frame.Type, frame.ClassId, frame.MessageId, frame.TimerIndex,
                    Hex(frame.Content)));
            if (at == stream.Length)
                break;
            ArraySegment<byte> space = reader.Space();
            int count = Math.Min(Math.Min(chunk, space.Count), stream.Length - at);
            Buffer.BlockCopy(stream, at, space.Array, space.Offset, count);
            reader.Fill(count);
            at += count;
        }
        found.Add(reader.Leftover.ToString());
        return string.Join(";", found);
    }

    /// <summary>Return the Ack frames, for `group CLASS:TIMER:ID …`.</summary>
    private static string Grouped(IEnumerable<string> messages)
    {
        AckLog log = new AckLog();
        foreach (string message in messages)
        {
            string[] parts = message.Split(':');
            log.Add(ushort.Parse(parts[0]), ushort.Parse(parts[1]), uint.Parse(parts[2]));
        }
        ByteBuffer buffer = new ByteBuffer(1);
        log.Take(buffer);
        return Hex(new ArraySegment<byte>(buffer.Bytes, 0, buffer.Count));
    }

    private static string Decoded(string hex)
    {
        ShopCreated shop = ShopCreated.Decode(new ArraySegment<byte>(Bytes(hex)));
        return shop.Id + " " + Hex(System.Text.Encoding.UTF8.GetBytes(shop.Name));
    }

    private static string Published(ushort classId, string hex)
    {
        ClientOptions options = new ClientOptions { FrameBytesMax = 100, Log = null };
        using (Version1Client bus = new Version1Client(options))
        {
            bus.Bind(1);
            bus.Publish(classId, new ArraySegment<byte>(Bytes(hex)));
        }
        return "queued";
    }

    private static string Tried(Func<string> what)
    {
        try
        {
            return what();
        }
        catch (InvalidDataException error)
        {
            return "invalid: " + error.Message;
        }
        catch (ArgumentException error)
        {
            return "refused: " + error.Message;
        }
        catch (InvalidOperationException error)
        {
            return "refused: " + error.Message;
        }
    }

    private static byte[] Bytes(string hex)
    {
        byte[] bytes = new byte[hex.Length / 2];
        for (int at = 0; at < bytes.Length; at++)
            bytes[at] = Convert.ToByte(hex.Substring(2 * at, 2), 16);
        return bytes;
    }

    private static string Text(string hex)
    {
        return System.Text.Encoding.UTF8.GetString(Bytes(hex));
    }

    private static string Hex(byte[] bytes)
    {
        return Hex(new ArraySegment<byte>(bytes));
    }

    private static string Hex(ArraySegment<byte> bytes)
    {
        return BitConverter.ToString(bytes.Array, bytes.Offset, bytes.Count).Replace("-", "")
            .ToLowerInvariant();
    }
}
