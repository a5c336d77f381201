using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.Json;
using System.Threading.Tasks;
using SimpleBus.Client.Connection;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Tests
{
    /// <summary>Frames, envelopes, stuffing and ack ranges against the vectors of the protocol.</summary>
    public static class VectorTests
    {
        [Test]
        public static Task EncodesTheFramesOfTheVectors()
        {
            foreach (JsonElement vector in Read("v2-frames", "frames"))
            {
                ByteWriter writer = new ByteWriter();
                Frame.Append(
                    writer, (byte)Number(vector, "type"), (ushort)Number(vector, "a"), (uint)Number(vector, "b"),
                    (ushort)Number(vector, "c"), Bytes(vector, "content_"));
                Check.Equal(Hex(Bytes(vector, "")), Hex(writer.WrittenSpan));
            }
            return Task.CompletedTask;
        }

        [Test]
        public static Task FindsFramesInAnyFragmentation()
        {
            foreach (JsonElement vector in Read("streams", "streams"))
            {
                byte[] stream = Bytes(vector, "");
                foreach (int chunk in new[] { 1, 2, 3, 11, int.MaxValue })
                {
                    if (stream.Length > 2000 && chunk < 11)
                        continue;
                    ReceiveBuffer buffer = new ReceiveBuffer();
                    List<string> found = new List<string>();
                    for (int at = 0; at < stream.Length;)
                    {
                        Memory<byte> space = buffer.GetSpace();
                        int count = Math.Min(Math.Min(chunk, space.Length), stream.Length - at);
                        stream.AsMemory(at, count).CopyTo(space);
                        buffer.Advance(count);
                        at += count;
                        while (buffer.TryReadFrame(out Frame frame))
                            found.Add(
                                $"{frame.Type} {frame.A} {frame.B} {frame.C} "
                                + Hex(buffer.Bytes.AsSpan(frame.ContentOffset, frame.ContentLength)));
                    }
                    Check.Sequence(
                        vector.GetProperty("frames").EnumerateArray().Select(frame =>
                            $"{Number(frame, "type")} {Number(frame, "class_id")} {(uint)Number(frame, "message_id")} "
                            + $"{Number(frame, "timer_index")} {Hex(Bytes(frame, "content_"))}"),
                        found);
                    Check.Equal((int)Number(vector, "leftover"), buffer.IncompleteBytes);
                }
            }
            return Task.CompletedTask;
        }

        [Test]
        public static Task DecodesAndEncodesTheEnvelopesOfTheVectors()
        {
            foreach (JsonElement vector in Read("v2-envelopes", "valid"))
            {
                byte[] content = Bytes(vector, "content_");
                Envelope envelope = Envelope.Decode(content, out ReadOnlyMemory<byte> payload);
                Check.Equal(vector.GetProperty("channel").GetString(), envelope.Channel);
                Check.Equal(Hex(Bytes(vector, "key_")), Hex(envelope.Key.Span));
                Check.Sequence(
                    vector.GetProperty("headers").EnumerateArray().Select(pair => $"{pair[0]}={pair[1]}"),
                    envelope.Headers.Select(header => $"{header.Key}={header.Value}"));
                Check.Equal(vector.GetProperty("published").ToString(), $"{envelope.PublishedMicroseconds}");
                Check.Equal(vector.GetProperty("expires").ToString(), $"{envelope.ExpiresMilliseconds}");
                Check.Equal(vector.GetProperty("not_before").ToString(), $"{envelope.NotBeforeMilliseconds}");
                Check.Equal(Hex(Bytes(vector, "payload_")), Hex(payload.Span));
                if (!vector.GetProperty("shortest").GetBoolean())
                    continue;
                ByteWriter plain = new ByteWriter();
                envelope.WriteFields(plain);
                plain.Write(payload.Span);
                ByteWriter stuffed = new ByteWriter();
                Stuffing.Stuff(plain.WrittenSpan, stuffed);
                Check.Equal(Hex(content), Hex(stuffed.WrittenSpan));
            }
            return Task.CompletedTask;
        }

        [Test]
        public static Task RejectsTheInvalidEnvelopesOfTheVectors()
        {
            foreach (JsonElement vector in Read("v2-envelopes", "invalid"))
                if (vector.GetProperty("reason").GetString() == "bad_envelope")
                    Check.Throws<FormatException>(() => Envelope.Decode(Bytes(vector, "content_"), out _));
            return Task.CompletedTask;
        }

        [Test]
        public static Task StuffsAndUnstuffsAsInTheVectors()
        {
            foreach (JsonElement vector in Read("v2-stuffing", "stuffing"))
            {
                ByteWriter stuffed = new ByteWriter();
                Stuffing.Stuff(Bytes(vector, "plain_"), stuffed);
                Check.Equal(Hex(Bytes(vector, "stuffed_")), Hex(stuffed.WrittenSpan));
            }
            foreach (JsonElement vector in Read("v2-stuffing", "stuffing").Concat(Read("v2-stuffing", "unstuffing")))
                Check.Equal(Hex(Bytes(vector, "plain_")), Hex(Stuffing.Unstuff(Bytes(vector, "stuffed_")).Span));
            return Task.CompletedTask;
        }

        [Test]
        public static Task GroupsAcksAsInTheVectors()
        {
            foreach (JsonElement vector in Read("acks", "grouping"))
            {
                AckBuffer acks = new AckBuffer(3);
                long next = -1;
                foreach (long id in vector.GetProperty("ids").EnumerateArray().Select(id => id.GetInt64()))
                {
                    // The inbox maps an id to the sequence that is nearest to the one before.
                    long sequence = next < 0 ? id : next + ((id - next + (1L << 30) + (1L << 31)) % (1L << 31)) - (1L << 30);
                    acks.Ack(sequence, sequence + 1);
                    next = sequence + 1;
                }
                ByteWriter writer = new ByteWriter();
                acks.WriteTo(writer);
                ReceiveBuffer buffer = new ReceiveBuffer();
                writer.WrittenMemory.CopyTo(buffer.GetSpace());
                buffer.Advance(writer.Count);
                List<string> contents = new List<string>();
                while (buffer.TryReadFrame(out Frame frame))
                    contents.Add(Encoding.ASCII.GetString(buffer.Bytes, frame.ContentOffset, frame.ContentLength));
                Check.Sequence(
                    vector.GetProperty("contents").EnumerateArray().Select(content => content.GetString()), contents);
            }
            return Task.CompletedTask;
        }

        private static List<JsonElement> Read(string file, string list)
        {
            JsonDocument document = JsonDocument.Parse(File.ReadAllBytes(Path.Combine(Runner.Vectors, file + ".json")));
            return document.RootElement.GetProperty(list).EnumerateArray().ToList();
        }

        private static long Number(JsonElement vector, string name) => vector.GetProperty(name).GetInt64();

        private static byte[] Bytes(JsonElement vector, string prefix)
        {
            if (vector.TryGetProperty(prefix + "hex", out JsonElement hex))
                return FromHex(hex.GetString());
            return vector.GetProperty(prefix + "parts").EnumerateArray()
                .SelectMany(part => Enumerable.Repeat(FromHex(part[0].GetString()), part[1].GetInt32()))
                .SelectMany(bytes => bytes).ToArray();
        }

        private static byte[] FromHex(string text) =>
            Enumerable.Range(0, text.Length / 2).Select(at => Convert.ToByte(text.Substring(2 * at, 2), 16)).ToArray();

        private static string Hex(ReadOnlySpan<byte> bytes) => BitConverter.ToString(bytes.ToArray());
    }
}
