// Sockets: how one is opened and greeted, read from and written to.
//
// Rule 1: nothing is remembered here, and no thread is started. Whoever calls is the one that
//         waits.
// Rule 2: what a connection may throw is listed in one place, `IsItsFault`; anything else is a
//         fault of ours and is not caught anywhere.

using System;
using System.IO;
using System.Net;
using System.Net.Sockets;

namespace SimpleBus
{
    internal static class Wire
    {
        /// <summary>A socket on which the server has answered the hello, at the first address of
        /// the host where one does.</summary>
        public static Socket Dial(
            ClientOptions options, ByteBuffer hello, FrameReader reader, out int sessionId)
        {
            int patience = (int)(options.ConnectSeconds * 1000);
            Exception error = new SocketException((int)SocketError.HostNotFound);
            foreach (IPAddress address in Dns.GetHostAddresses(options.Host))
            {
                Socket fresh = new Socket(
                    address.AddressFamily, SocketType.Stream, ProtocolType.Tcp);
                try
                {
                    IAsyncResult connecting = fresh.BeginConnect(address, options.Port, null, null);
                    if (!connecting.AsyncWaitHandle.WaitOne(patience))
                        throw new SocketException((int)SocketError.TimedOut);
                    fresh.EndConnect(connecting);
                    fresh.NoDelay = true; // What is to go together is written together.
                    fresh.SetSocketOption(
                        SocketOptionLevel.Socket, SocketOptionName.KeepAlive, true);
                    fresh.ReceiveTimeout = patience;
                    Write(fresh, hello);
                    reader.Reset();
                    sessionId = Reply(fresh, reader);
                    fresh.ReceiveTimeout = 0;
                    return fresh;
                }
                catch (Exception failure)
                {
                    fresh.Close();
                    if (!IsItsFault(failure))
                        throw;
                    error = failure;
                }
            }
            throw error;
        }

        /// <summary>Read what has come, at least a byte. EndOfStreamException at the end.</summary>
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

        /// <summary>Whether an error says that a connection cannot be had, is gone or speaks
        /// nonsense. ObjectDisposedException: another thread has closed the socket.</summary>
        public static bool IsItsFault(Exception error)
        {
            return error is SocketException || error is IOException || error is InvalidDataException
                || error is ObjectDisposedException;
        }

        /// <summary>The session id of the first Connect reply. What comes before it is passed over.
        /// </summary>
        private static int Reply(Socket fresh, FrameReader reader)
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
                    // The one little-endian number of the protocol.
                    return bytes[at] | bytes[at + 1] << 8 | bytes[at + 2] << 16
                        | bytes[at + 3] << 24;
                }
                Read(fresh, reader);
            }
        }
    }
}
