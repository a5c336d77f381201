// Connections of a client, one after the other, and the two threads that serve them.
//
// The reader thread connects, performs the handshake, reads, and runs the handlers. If the handlers
// are slow, TCP slows the server, for this client only.
// After the handshake only the writer thread writes: first control frames of the session, then
// acks, then one chunk of messages, and again.
// All state shared by both threads and publishers is protected by `gate`. No handler runs and no
// socket is used while it is held.
// Acks are sent only in the session of their messages (see Acks.cs). Unsent messages wait for the
// next session.
//
//   Dial -> Attach -> read … handle … read … handle … -> Detach -> Pause -> Dial
//              |                                            |
//              +---------- the writer has a socket ---------+

using System;
using System.Diagnostics;
using System.Net.Sockets;
using System.Threading;

namespace SimpleBus.Version1
{
    internal sealed class Link
    {
        private const int PauseMinMs = 100;
        private const int PauseMaxMs = 5000;
        // A session that lasted this long resets the backoff.
        private const int GoodSessionMs = 1000;

        private readonly ClientOptions options;
        private readonly Func<ByteBuffer, int> hello;
        private readonly Action<ByteBuffer, int> catchUp;
        private readonly Func<Frame, bool> handle;
        private readonly object gate = new object();
        private readonly Stopwatch clock = Stopwatch.StartNew();
        private readonly Random random = new Random();
        private readonly FrameReader reader;
        private readonly SendQueue queue;
        private readonly AckLog acks = new AckLog();
        private readonly ByteBuffer control = new ByteBuffer(64);
        private readonly Thread readerThread;
        private readonly Thread writerThread;

        private int named; // Number of classes in the Connect of this session.
        private Socket socket; // Socket of the open session; null without one.
        private bool begun;
        private bool writerWaits;
        private bool writing;
        private bool handling; // The reader processes frames whose handlers may run.
        private volatile bool closing; // No more handlers are started.
        private bool closed; // Nothing more is written.
        private long oldestAckMs;
        private long lastWriteMs;
        private Exception lastError;

        /// <param name="hello">Writes the Connect of a new session; returns the number of classes
        /// in it.</param>
        /// <param name="catchUp">Writes the other control frames of the session, given that number.
        /// Called with the gate held.</param>
        /// <param name="handle">Processes a message. Returns whether to acknowledge it.</param>
        public Link(
            ClientOptions options, Func<ByteBuffer, int> hello, Action<ByteBuffer, int> catchUp,
            Func<Frame, bool> handle)
        {
            this.options = options;
            this.hello = hello;
            this.catchUp = catchUp;
            this.handle = handle;
            reader = new FrameReader(options.FrameBytesMax);
            queue = new SendQueue(options.QueuedBytesMax);
            readerThread = new Thread(ReadAll) { IsBackground = true, Name = "SimpleBus reader" };
            writerThread = new Thread(WriteAll) { IsBackground = true, Name = "SimpleBus writer" };
        }

        public int SessionId { get; private set; }

        public bool IsConnected
        {
            get
            {
                lock (gate)
                    return socket != null;
            }
        }

        // Interface of the client ----------------------------------------------------------------

        /// <summary>Start, and wait for the first session.</summary>
        public void Connect(TimeSpan patience)
        {
            lock (gate)
            {
                if (!begun && !closing)
                {
                    begun = true;
                    readerThread.Start();
                    writerThread.Start();
                }
                long deadline = clock.ElapsedMilliseconds + (long)patience.TotalMilliseconds;
                while (socket == null)
                {
                    if (closing)
                        throw new ObjectDisposedException("Version1Client");
                    if (!WaitUntil(deadline))
                        throw new TimeoutException(
                            "no session with " + options.Host + ":" + options.Port + " was opened within "
                            + patience.TotalSeconds + " s"
                            + (lastError == null ? "" : ": " + lastError.Message), lastError);
                }
            }
        }

        /// <summary>Change the classes or subscriptions, and update the open session. `change` runs
        /// with the gate held, so every session sees it.</summary>
        public void Want(Action<ByteBuffer> change)
        {
            lock (gate)
            {
                change(control);
                if (socket == null)
                    control.Count = 0; // The next session sends all control frames again.
                else
                    Monitor.PulseAll(gate);
            }
        }

        /// <summary>Queue a message. Waits while the queue is full.</summary>
        public void Publish(ushort classId, ArraySegment<byte> payload)
        {
            lock (gate)
            {
                while (queue.IsFull && !closed)
                    Monitor.Wait(gate);
                if (closed)
                    throw new ObjectDisposedException("Version1Client");
                queue.PutMessage(classId, payload);
                if (writerWaits)
                    Monitor.PulseAll(gate);
            }
        }

        /// <summary>Wait until every message is handed to the operating system. Returns false on a
        /// timeout.</summary>
        public bool Flush(TimeSpan patience)
        {
            lock (gate)
            {
                long deadline = clock.ElapsedMilliseconds + (long)patience.TotalMilliseconds;
                while (!queue.IsEmpty && !closed)
                    if (!WaitUntil(deadline))
                        break;
                return queue.IsEmpty;
            }
        }

        /// <summary>Wait for the running handler, write the queue and the acks, and close the
        /// connection.</summary>
        public void Close()
        {
            Socket last;
            int unsent;
            lock (gate)
            {
                if (closing)
                    return;
                closing = true;
                long deadline = clock.ElapsedMilliseconds + (long)(options.CloseSeconds * 1000);
                Monitor.PulseAll(gate);
                while (begun && (handling || writing || !queue.IsEmpty || acks.Count > 0))
                    if (!WaitUntil(deadline))
                        break;
                closed = true;
                Monitor.PulseAll(gate);
                last = socket;
                unsent = queue.QueuedBytes;
            }
            if (unsent > 0)
                Log("closed before " + unsent + " bytes of messages were sent");
            if (!begun)
                return;
            try
            {
                // Closing at once, with unread bytes, would make TCP discard what was just written.
                // The server closes when it has read everything, which the reader sees.
                if (last != null)
                    last.Shutdown(SocketShutdown.Send);
            }
            catch (SocketException) { }
            catch (ObjectDisposedException) { }
            if (!readerThread.Join(TimeSpan.FromSeconds(options.CloseSeconds)) && last != null)
                last.Close();
            writerThread.Join(TimeSpan.FromSeconds(1));
        }

        public bool IsReaderThread
        {
            get { return Thread.CurrentThread == readerThread; }
        }

        // Reader thread --------------------------------------------------------------------------

        private void ReadAll()
        {
            int pause = PauseMinMs;
            while (GoesOn())
            {
                long began = clock.ElapsedMilliseconds;
                Socket session = null;
                try
                {
                    session = Dial();
                    began = clock.ElapsedMilliseconds;
                    Attach(session);
                    Receive(session);
                }
                catch (Exception error)
                {
                    if (!Wire.IsConnectionFailure(error))
                        throw;
                    Detach(session, error);
                }
                if (session != null && clock.ElapsedMilliseconds - began >= GoodSessionMs)
                    pause = PauseMinMs;
                Pause(pause);
                pause = Math.Min(2 * pause, PauseMaxMs);
            }
        }

        private bool GoesOn()
        {
            lock (gate)
                return !closing || (!closed && !queue.IsEmpty);
        }

        /// <summary>Return a socket on which the server has replied to the Connect.</summary>
        private Socket Dial()
        {
            ByteBuffer connect = new ByteBuffer(64);
            lock (gate)
                named = hello(connect);
            int sessionId;
            Socket session = Wire.Dial(options, connect, reader, out sessionId);
            SessionId = sessionId;
            return session;
        }

        private void Attach(Socket session)
        {
            lock (gate)
            {
                if (closed)
                    throw new ObjectDisposedException("Version1Client"); // Closed meanwhile.
                control.Count = 0;
                catchUp(control, named);
                acks.Clear();
                lastWriteMs = clock.ElapsedMilliseconds;
                lastError = null;
                socket = session;
                Monitor.PulseAll(gate);
            }
        }

        private void Receive(Socket session)
        {
            while (true)
            {
                lock (gate)
                    handling = !closing;
                Frame frame;
                try
                {
                    while (reader.Next(out frame))
                        // While closing, frames are discarded: the server redelivers them.
                        if (frame.Type == Frames.Message && !closing && handle(frame))
                            Processed(frame);
                }
                finally
                {
                    lock (gate)
                    {
                        handling = false;
                        if (closing)
                            Monitor.PulseAll(gate);
                    }
                }
                Wire.Read(session, reader);
            }
        }

        private void Processed(Frame frame)
        {
            lock (gate)
            {
                if (acks.Count == 0)
                    oldestAckMs = clock.ElapsedMilliseconds;
                acks.Add(frame.ClassId, frame.TimerIndex, frame.MessageId);
                // The first ack starts the writer's timer; a full log is written at once.
                if (writerWaits && (acks.Count == 1 || acks.Count == options.AcksMax))
                    Monitor.PulseAll(gate);
            }
        }

        /// <summary>Release a connection that was lost or failed.</summary>
        private void Detach(Socket session, Exception error)
        {
            lock (gate)
            {
                socket = null;
                control.Count = 0;
                acks.Clear();
                lastError = error;
                Monitor.PulseAll(gate);
            }
            if (session != null)
                session.Close();
            if (!closing)
                Log((session == null ? "cannot connect: " : "connection lost: ") + error.Message);
        }

        /// <summary>Return a random pause near this one, so that clients do not reconnect at the
        /// same moment.</summary>
        private void Pause(int milliseconds)
        {
            lock (gate)
            {
                long deadline = clock.ElapsedMilliseconds
                    + (long)(milliseconds * (0.75 + random.NextDouble() / 2));
                while (!closing && WaitUntil(deadline)) { }
                if (closing && !closed && !queue.IsEmpty)
                    Monitor.Wait(gate, PauseMinMs);
            }
        }

        // Writer thread --------------------------------------------------------------------------

        private void WriteAll()
        {
            ByteBuffer first = new ByteBuffer(4096);
            while (true)
            {
                Socket session;
                ByteBuffer chunk;
                lock (gate)
                {
                    writing = false;
                    if (closing)
                        Monitor.PulseAll(gate);
                    if (!WaitForWork())
                        return;
                    session = socket;
                    Gather(first);
                    chunk = queue.Peek();
                    writing = true;
                }
                try
                {
                    if (first.Count > 0)
                        Wire.Write(session, first);
                    if (chunk != null)
                        Wire.Write(session, chunk);
                }
                catch (Exception error)
                {
                    if (!Wire.IsConnectionFailure(error))
                        throw;
                    Break(session);
                    continue;
                }
                lock (gate)
                {
                    lastWriteMs = clock.ElapsedMilliseconds;
                    if (chunk == null)
                        continue;
                    bool wasFull = queue.IsFull;
                    queue.Sent();
                    if ((wasFull && !queue.IsFull) || queue.IsEmpty)
                        Monitor.PulseAll(gate); // Publishers, or callers of Flush.
                }
            }
        }

        /// <summary>Wait until there are bytes to write and a socket. False when the link is
        /// closed.</summary>
        private bool WaitForWork()
        {
            while (!closed)
            {
                long alarm = long.MaxValue;
                if (socket != null)
                {
                    if (control.Count > 0 || !queue.IsEmpty)
                        return true;
                    alarm = Math.Min(AcksDueMs, HeartbeatDueMs);
                    if (alarm <= clock.ElapsedMilliseconds)
                        return true;
                }
                writerWaits = true;
                WaitUntil(alarm);
                writerWaits = false;
            }
            return false;
        }

        private long AcksDueMs
        {
            get
            {
                if (acks.Count == 0)
                    return long.MaxValue;
                bool now = acks.Count >= options.AcksMax || closing;
                return now ? 0 : oldestAckMs + (long)(options.AckSeconds * 1000);
            }
        }

        private long HeartbeatDueMs
        {
            get { return lastWriteMs + (long)(options.HeartbeatSeconds * 1000); }
        }

        /// <summary>Append the control frames, which precede messages.</summary>
        private void Gather(ByteBuffer first)
        {
            first.Count = 0;
            Buffer.BlockCopy(control.Bytes, 0, first.Reserve(control.Count), 0, control.Count);
            first.Count = control.Count;
            control.Count = 0;
            long now = clock.ElapsedMilliseconds;
            if (AcksDueMs <= now)
                acks.Take(first);
            else if (first.Count == 0 && queue.IsEmpty)
                // Keeps middleboxes from dropping this connection, and detects a dead one.
                Frames.Write(first, Frames.Heartbeat, 0, 0, 0, new ArraySegment<byte>(new byte[0]));
        }

        /// <summary>The connection failed during a write: wake the reader, which cleans
        /// up.</summary>
        private void Break(Socket session)
        {
            lock (gate)
                if (socket == session)
                    socket = null;
            try
            {
                session.Shutdown(SocketShutdown.Both);
            }
            catch (SocketException) { }
            catch (ObjectDisposedException) { }
        }

        // Both threads ---------------------------------------------------------------------------

        /// <summary>Wait for a pulse with the gate held. False after the deadline.</summary>
        private bool WaitUntil(long deadlineMs)
        {
            long left = deadlineMs - clock.ElapsedMilliseconds;
            if (left <= 0)
                return false;
            Monitor.Wait(gate, (int)Math.Min(left, 60 * 1000));
            return true;
        }

        private void Log(string line)
        {
            if (options.Log != null)
                options.Log(line);
        }
    }
}
