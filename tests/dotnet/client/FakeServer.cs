using System;
using System.Net;
using System.Net.Sockets;
using System.Text;
using System.Threading.Tasks;
using SimpleBus.Client.Protocol;

namespace SimpleBus.Client.Tests
{
    /// <summary>Server that sends only the frames that a test decides.</summary>
    internal sealed class FakeServer : IDisposable
    {
        private readonly TcpListener _listener = new TcpListener(IPAddress.Loopback, 0);
        private Socket? _socket;
        private ReceiveBuffer _buffer = new ReceiveBuffer();

        public FakeServer()
        {
            _listener.Start();
        }

        public string Url => $"simplebus://127.0.0.1:{((IPEndPoint)_listener.LocalEndpoint).Port}";

        /// <summary>Accept a connection and reply to its Connect. Returns the content of the Connect.</summary>
        public async Task<string> AcceptAsync(
            string bus = "b", string run = "r", uint next = 0, long credit = 1 << 20, double heartbeat = 0)
        {
            _socket = await _listener.AcceptSocketAsync();
            _buffer = new ReceiveBuffer();
            (byte type, _, uint request, _, string content) = await ReadAsync();
            Check.Equal(FrameType.Connect, type);
            Send(FrameType.Connect, 0, request, 0, FormattableString.Invariant(
                $@"{{""session"":1,""version"":2,""server"":"""",""bus"":""{bus}"",""classes"":{{}},""next"":{next},""credit"":{credit},
                ""heartbeat"":{heartbeat},""frame_bytes"":1048576,""ack_seconds"":6.0,""run"":""{run}"",""level"":1,""lost"":0,
                ""duplicates"":0.0,""replies"":""simplebus.replies.""}}"));
            return content;
        }

        /// <summary>Reply to the Connect that names class 1.</summary>
        public async Task NameClassAsync()
        {
            (byte type, _, uint request, _, string content) = await ReadAsync();
            Check.Equal((FrameType.Connect, "{\"classes\":[1]}"), (type, content));
            Send(FrameType.Connect, 0, request, 0, @"{""session"":1,""version"":2,""server"":"""",""bus"":""b"",""classes"":{},
                ""next"":0,""credit"":1,""heartbeat"":0,""frame_bytes"":1048576,""ack_seconds"":6.0,""run"":""r"",""level"":1,
                ""lost"":0,""duplicates"":0.0,""replies"":""""}");
        }

        /// <summary>Return the next frame of the client.</summary>
        public async Task<(byte Type, ushort A, uint B, ushort C, string Content)> ReadAsync()
        {
            while (true)
            {
                if (_buffer.TryReadFrame(out Frame frame))
                    return (
                        frame.Type, frame.A, frame.B, frame.C,
                        Encoding.UTF8.GetString(_buffer.Bytes, frame.ContentOffset, frame.ContentLength));
                int count = await _socket!.ReceiveAsync(_buffer.GetSpace(), SocketFlags.None);
                Check.True(count > 0, "the client is connected");
                _buffer.Advance(count);
            }
        }

        public void Send(byte type, ushort a = 0, uint b = 0, ushort c = 0, string content = "")
        {
            ByteWriter writer = new ByteWriter();
            Frame.Append(writer, type, a, b, c, Encoding.UTF8.GetBytes(content));
            _socket!.Send(writer.WrittenSpan);
        }

        /// <summary>Close the connection.</summary>
        public void Disconnect() => _socket!.Dispose();

        public void Dispose()
        {
            _socket?.Dispose();
            _listener.Stop();
        }
    }
}
