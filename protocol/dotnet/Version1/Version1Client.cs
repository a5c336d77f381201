// The client: classes, message types, handlers. Sockets are in Link.cs, frames in Frames.cs.
//
// A message is acknowledged after its handlers have run, and only if none of them threw.
// A class is subscribed to once per session, however many handlers it has.
// The tables are replaced, never modified, because handlers run while other threads subscribe.

using System;
using System.Collections.Generic;
using System.Globalization;
using System.Text;
using System.Threading;

namespace SimpleBus.Version1
{
    /// <summary>Address of the bus, and limits. Set them before creating the client.</summary>
    public sealed class ClientOptions
    {
        public string Host = "127.0.0.1";
        public int Port = 8888;
        /// <summary>Longest frame, of which 13 bytes are framing. At most the server's limit, which
        /// is this by default.</summary>
        public int FrameBytesMax = 1024 * 1024;
        /// <summary>Limit of queued bytes, at which Publish waits.</summary>
        public int QueuedBytesMax = 4 * 1024 * 1024;
        /// <summary>Longest delay of an acknowledgement. The servers' ack timeout is 6 seconds by
        /// default; the protocol recommends at most 1.5.</summary>
        public double AckSeconds = 1.0;
        /// <summary>Number of processed messages at which acks are written at once.</summary>
        public int AcksMax = 4096;
        /// <summary>Timeout of one attempt to connect, with the handshake.</summary>
        public double ConnectSeconds = 5.0;
        /// <summary>Interval of heartbeats while nothing else is sent.</summary>
        public double HeartbeatSeconds = 30.0;
        /// <summary>Timeout of closing: for handlers and writing, and then again for the
        /// server.</summary>
        public double CloseSeconds = 5.0;
        /// <summary>Receives a line for each lost connection and failed handler. May be
        /// null.</summary>
        public Action<string> Log = Console.Error.WriteLine;
    }

    /// <summary>A received message. The payload is valid until the handler returns.</summary>
    public struct Delivery
    {
        public ushort ClassId;
        /// <summary>Counts within the class, from 0 to 2147483647 and then from 0 again. An id
        /// below the next expected one is a redelivery.</summary>
        public uint MessageId;
        public ushort TimerIndex;
        public ArraySegment<byte> Payload;
    }

    /// <summary>A client of the bus. All methods are thread-safe.</summary>
    public sealed class Version1Client : IDisposable
    {
        private static readonly Action<Delivery>[] Nobody = new Action<Delivery>[0];

        private readonly ClientOptions options;
        private readonly Link link;
        private readonly object gate = new object(); // For replacing tables.
        private readonly List<ushort> classIds = new List<ushort>(); // Under the link's gate.
        private readonly List<ushort> subscribed = new List<ushort>(); // Under the link's gate.
        private volatile HashSet<ushort> bound = new HashSet<ushort>();
        private volatile Dictionary<Type, Binding> bindings = new Dictionary<Type, Binding>();
        private volatile Dictionary<ushort, Action<Delivery>[]> handlers =
            new Dictionary<ushort, Action<Delivery>[]>();

        public Version1Client(ClientOptions options)
        {
            this.options = options;
            link = new Link(options, Hello, CatchUp, Handle);
        }

        /// <summary>Session id of the current or last session.</summary>
        public int SessionId
        {
            get { return link.SessionId; }
        }

        public bool IsConnected
        {
            get { return link.IsConnected; }
        }

        // Classes --------------------------------------------------------------------------------

        /// <summary>Use this class with raw payloads.</summary>
        public void Bind(ushort classId)
        {
            link.Want(control =>
            {
                if (classIds.Contains(classId))
                    return;
                classIds.Add(classId);
                bound = new HashSet<ushort>(classIds);
                WriteConnect(control, new[] { classId });
            });
        }

        /// <summary>Use this class for messages of this type.</summary>
        public void Bind<T>(
            ushort classId, Func<T, byte[]> encode, Func<ArraySegment<byte>, T> decode)
        {
            Binding binding = new Binding { ClassId = classId, Encode = encode, Decode = decode };
            lock (gate)
            {
                if (bindings.ContainsKey(typeof(T)))
                    throw new InvalidOperationException(typeof(T) + " is already bound to a class");
                bindings = new Dictionary<Type, Binding>(bindings) { { typeof(T), binding } };
            }
            Bind(classId);
        }

        // Connecting -----------------------------------------------------------------------------

        /// <summary>Start, and wait for the first session. TimeoutException if it takes longer.
        /// From then on the client reconnects until it is closed.</summary>
        public void Connect(TimeSpan patience)
        {
            link.Connect(patience);
        }

        /// <summary>Wait for handlers, write the queue, acknowledge, and disconnect. In a handler
        /// this only starts closing, because the handler itself must end first.</summary>
        public void Dispose()
        {
            if (link.IsReaderThread)
                new Thread(link.Close) { IsBackground = true, Name = "SimpleBus closing" }.Start();
            else
                link.Close();
        }

        // Publishing -----------------------------------------------------------------------------

        public void Publish<T>(T message)
        {
            Binding binding = BindingOf(typeof(T));
            Func<T, byte[]> encode = (Func<T, byte[]>)binding.Encode;
            Publish(binding.ClassId, new ArraySegment<byte>(encode(message)));
        }

        /// <summary>Queue a message. Waits while the queue is full.
        ///
        /// A server closes the connection for a message that it refuses, each time that it is sent.
        /// So such messages are refused here: InvalidOperationException for a class that was not
        /// bound; ArgumentException for a payload that contains the delimiter, or that is too
        /// long.</summary>
        public void Publish(ushort classId, ArraySegment<byte> payload)
        {
            if (!bound.Contains(classId))
                throw new InvalidOperationException("class " + classId + " is not bound; call Bind before Publish");
            if (payload.Count > options.FrameBytesMax - Frames.Overhead)
                throw new ArgumentException(
                    "a payload has " + payload.Count + " bytes; expected at most "
                    + (options.FrameBytesMax - Frames.Overhead));
            int end = payload.Offset + payload.Count;
            int at = Frames.FindDelimiter(payload.Array, payload.Offset, end);
            if (at >= 0)
                throw new ArgumentException(
                    "a payload contains the delimiter 3C 0D 0A 3E at offset " + (at - payload.Offset));
            link.Publish(classId, payload);
        }

        /// <summary>Wait until all published messages are handed to the operating system. Returns
        /// false on a timeout. Version 1 has no confirms.</summary>
        public bool Flush(TimeSpan patience)
        {
            return link.Flush(patience);
        }

        // Subscribing ----------------------------------------------------------------------------

        /// <summary>Call a handler for every message of this type. More handlers may be added at
        /// any time.</summary>
        public void Subscribe<T>(Action<T> handler)
        {
            Binding binding = BindingOf(typeof(T));
            Func<ArraySegment<byte>, T> decode = (Func<ArraySegment<byte>, T>)binding.Decode;
            Subscribe(binding.ClassId, delivery => handler(decode(delivery.Payload)));
        }

        /// <summary>Call a handler for every message of this class, on the reader thread: one at a
        /// time, in the order of arrival. If it throws, the message is redelivered.</summary>
        public void Subscribe(ushort classId, Action<Delivery> handler)
        {
            lock (gate)
            {
                Action<Delivery>[] before;
                if (!handlers.TryGetValue(classId, out before))
                    before = Nobody;
                Action<Delivery>[] after = new Action<Delivery>[before.Length + 1];
                before.CopyTo(after, 0);
                after[before.Length] = handler;
                Dictionary<ushort, Action<Delivery>[]> changed =
                    new Dictionary<ushort, Action<Delivery>[]>(handlers);
                changed[classId] = after;
                handlers = changed;
            }
            link.Want(control =>
            {
                if (subscribed.Contains(classId))
                    return;
                subscribed.Add(classId);
                WriteSubscribe(control, classId);
            });
        }

        // Callbacks of the link ------------------------------------------------------------------

        private int Hello(ByteBuffer connect)
        {
            WriteConnect(connect, classIds);
            return classIds.Count;
        }

        private void CatchUp(ByteBuffer control, int named)
        {
            if (named < classIds.Count)
                WriteConnect(control, classIds.GetRange(named, classIds.Count - named));
            foreach (ushort classId in subscribed)
                WriteSubscribe(control, classId);
        }

        private bool Handle(Frame frame)
        {
            Delivery delivery = new Delivery
            {
                ClassId = frame.ClassId,
                MessageId = frame.MessageId,
                TimerIndex = frame.TimerIndex,
                Payload = frame.Content,
            };
            Action<Delivery>[] all;
            if (!handlers.TryGetValue(frame.ClassId, out all))
                return false;
            bool good = true;
            foreach (Action<Delivery> handler in all)
            {
                try
                {
                    handler(delivery);
                }
                catch (Exception error)
                {
                    // Not acknowledged, so it is redelivered. The other handlers still run.
                    good = false;
                    if (options.Log != null)
                        options.Log(
                            "a handler failed on message " + frame.MessageId + " of class "
                            + frame.ClassId + ", which will be redelivered: " + error.Message);
                }
            }
            return good;
        }

        // Helpers --------------------------------------------------------------------------------

        private Binding BindingOf(Type type)
        {
            Binding binding;
            if (!bindings.TryGetValue(type, out binding))
                throw new InvalidOperationException(type + " is not bound to a class; call Bind first");
            return binding;
        }

        private static void WriteConnect(ByteBuffer to, IEnumerable<ushort> classIds)
        {
            StringBuilder array = new StringBuilder("[");
            foreach (ushort classId in classIds)
            {
                if (array.Length > 1)
                    array.Append(',');
                array.Append(classId.ToString(CultureInfo.InvariantCulture));
            }
            byte[] content = Encoding.ASCII.GetBytes(array.Append(']').ToString());
            Frames.Write(to, Frames.Connect, 0, 0, 0, new ArraySegment<byte>(content));
        }

        private static void WriteSubscribe(ByteBuffer to, ushort classId)
        {
            Frames.Write(
                to, Frames.Subscribe, classId, 0, 0, new ArraySegment<byte>(new byte[0]));
        }

        private sealed class Binding
        {
            public ushort ClassId;
            public Delegate Encode;
            public Delegate Decode;
        }
    }
}
