// Sockets: opening, handshake, reading and writing. Stateless; calls block, and no thread is
// started.
//
// `IsConnectionFailure` lists all exceptions of a connection; others are bugs and are not caught.

using System;
using System.IO;
using System.Net;
using System.Net.Sockets;

namespace SimpleBus.Version1
{
    internal static class Wire
    {
        /// <summary>Return a socket on which the server has replied to the Connect, at the first
        /// address of the host where it does.</summary>
        public static Socket Dial(
            ClientOptions options, ByteBuffer hello, FrameReader reader, out int sessionId)
        {
            int patience = (int)(options.ConnectSeconds * 1000);
            Exception error = new SocketException((int)SocketError.HostNotFound);
            foreach (IPAddress address in Dns.GetHostAddresses(options.Host))
            {
                Socket socket = new Socket(
                    address.AddressFamily, SocketType.Stream, ProtocolType.Tcp);
                try
                {
                    IAsyncResult connecting = socket.BeginConnect(address, options.Port, null, null);
                    if (!connecting.AsyncWaitHandle.WaitOne(patience))
                        throw new SocketException((int)SocketError.TimedOut);
                    socket.EndConnect(connecting);
                    socket.NoDelay = true; // Bytes that belong together are written together.
                    socket.SetSocketOption(
                        SocketOptionLevel.Socket, SocketOptionName.KeepAlive, true);
                    socket.ReceiveTimeout = patience;
                    Write(socket, hello);
                    reader.Reset();
                    sessionId = Reply(socket, reader);
                    socket.ReceiveTimeout = 0;
                    return socket;
                }
                catch (Exception failure)
                {
                    socket.Close();
                    if (!IsConnectionFailure(failure))
                        throw;
                    error = failure;
                }
            }
            throw error;
        }

        /// <summary>Read the available bytes, at least one. EndOfStreamException at the
        /// end.</summary>
        public static void Read(Socket session, FrameReader reader)
        {
            ArraySegment<byte> space = reader.Space();
            int count = session.Receive(space.Array, space.Offset, space.Count, SocketFlags.None);
            if (count == 0)
                throw new EndOfStreamException("the server has closed the connection");
            reader.Fill(count);
        }

        public static void Write(Socket session, ByteBuffer bytes)
        {
            int at = 0;
            while (at < bytes.Count)
                at += session.Send(bytes.Bytes, at, bytes.Count - at, SocketFlags.None);
        }

        /// <summary>True if an exception means that a connection cannot be opened, is lost or
        /// invalid. ObjectDisposedException: another thread has closed the socket.</summary>
        public static bool IsConnectionFailure(Exception error)
        {
            return error is SocketException || error is IOException || error is InvalidDataException
                || error is ObjectDisposedException;
        }

        /// <summary>Return the session id of the first Connect reply. Earlier frames are
        /// skipped.</summary>
        private static int Reply(Socket socket, FrameReader reader)
        {
            while (true)
            {
                Frame frame;
                while (reader.Next(out frame))
                {
                    if (frame.Type != Frames.Connect || frame.Content.Count != 4)
                        continue;
                    byte[] bytes = frame.Content.Array;
                    int at = frame.Content.Offset;
                    // The only little-endian number of the protocol.
                    return bytes[at] | bytes[at + 1] << 8 | bytes[at + 2] << 16
                        | bytes[at + 3] << 24;
                }
                Read(socket, reader);
            }
        }
    }
}
