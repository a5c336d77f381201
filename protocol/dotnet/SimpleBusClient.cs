// The client: classes, message types, handlers. What a program sees of the bus.
//
// Rule 1: no sockets and no waiting here: that is Link.cs. No bytes of frames either: that is
//         Frames.cs.
// Rule 2: a message is acknowledged after its handlers have run, and only if none of them threw.
// Rule 3: a class is subscribed to once per session, however many handlers it has.
// Rule 4: the tables are replaced, never changed: handlers run while others subscribe.

using System;
using System.Collections.Generic;
using System.Globalization;
using System.Text;
using System.Threading;

namespace SimpleBus
{
    /// <summary>Where the bus is, and what may take how long. Change it before the client is
    /// made.</summary>
    public sealed class ClientOptions
    {
        public string Host = "127.0.0.1";
        public int Port = 8888;
        /// <summary>The longest frame to send or to take; 13 bytes of it are framing. No more than
        /// the server takes, which is this much by default.</summary>
        public int FrameBytesMax = 1024 * 1024;
        /// <summary>Messages that wait to be written. Then Publish waits.</summary>
        public int QueuedBytesMax = 4 * 1024 * 1024;
        /// <summary>A processed message is acknowledged at the latest after this time. The servers'
        /// ack timeout is 6 seconds by default; the protocol asks for 1.5 at most.</summary>
        public double AckSeconds = 1.0;
        /// <summary>Or as soon as so many messages are processed.</summary>
        public int AcksMax = 4096;
        /// <summary>For one attempt to connect, hello included.</summary>
        public double ConnectSeconds = 5.0;
        /// <summary>After so much silence of ours we say something.</summary>
        public double HeartbeatSeconds = 30.0;
        /// <summary>What closing waits for handlers and for writing; and then for the
        /// server.</summary>
        public double CloseSeconds = 5.0;
        /// <summary>Is told of lost connections and failed handlers, a line each. May be
        /// null.</summary>
        public Action<string> Log = Console.Error.WriteLine;
    }

    /// <summary>A message as it came. The payload is valid until the handler returns.</summary>
    public struct Delivery
    {
        public ushort ClassId;
        /// <summary>Counts within the class, from 0 to 2147483647 and then from 0 again. An id
        /// behind the one that comes next is a redelivery.</summary>
        public uint MessageId;
        public ushort TimerIndex;
        public ArraySegment<byte> Payload;
    }

    /// <summary>One program's place on the bus. All its methods may be called by any
    /// thread.</summary>
    public sealed class SimpleBusClient : IDisposable
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

        public SimpleBusClient(ClientOptions options)
        {
            this.options = options;
            link = new Link(options, Hello, CatchUp, Handle);
        }

        /// <summary>The number that the server gave to the session that is or was up.</summary>
        public int SessionId
        {
            get { return link.SessionId; }
        }

        public bool IsConnected
        {
            get { return link.IsConnected; }
        }

        // Classes --------------------------------------------------------------------------------

        /// <summary>Use this class with payloads as they are.</summary>
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
                    throw new InvalidOperationException(typeof(T) + " is bound already");
                bindings = new Dictionary<Type, Binding>(bindings) { { typeof(T), binding } };
            }
            Bind(classId);
        }

        // Connecting -----------------------------------------------------------------------------

        /// <summary>Begin, and wait for the first session. TimeoutException when it takes longer.
        /// From then on a lost connection is made again until the client is closed.</summary>
        public void Connect(TimeSpan patience)
        {
            link.Connect(patience);
        }

        /// <summary>Close: let handlers end, write what is queued, acknowledge, hang up. Called by
        /// a handler it only begins that, for the handler itself has to end first.</summary>
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
        /// A server answers a message that it cannot take by hanging up, each time that it is sent.
        /// So that is refused here: InvalidOperationException for a class that was not bound;
        /// ArgumentException for a payload that has the delimiter in it, or that is too
        /// long.</summary>
        public void Publish(ushort classId, ArraySegment<byte> payload)
        {
            if (!bound.Contains(classId))
                throw new InvalidOperationException("class " + classId + " is not bound");
            if (payload.Count > options.FrameBytesMax - Frames.Overhead)
                throw new ArgumentException(
                    "a payload has " + payload.Count + " bytes, "
                    + (options.FrameBytesMax - Frames.Overhead) + " is the limit");
            int end = payload.Offset + payload.Count;
            int at = Frames.FindDelimiter(payload.Array, payload.Offset, end);
            if (at >= 0)
                throw new ArgumentException(
                    "a payload holds the delimiter, 3C 0D 0A 3E, at " + (at - payload.Offset));
            link.Publish(classId, payload);
        }

        /// <summary>Wait until everything published is handed to the system. Returns whether it is.
        /// That it has arrived, version 1 cannot tell.</summary>
        public bool Flush(TimeSpan patience)
        {
            return link.Flush(patience);
        }

        // Subscribing ----------------------------------------------------------------------------

        /// <summary>Call this for every message of this type. Another handler may be added any
        /// time.
        /// </summary>
        public void Subscribe<T>(Action<T> handler)
        {
            Binding binding = BindingOf(typeof(T));
            Func<ArraySegment<byte>, T> decode = (Func<ArraySegment<byte>, T>)binding.Decode;
            Subscribe(binding.ClassId, delivery => handler(decode(delivery.Payload)));
        }

        /// <summary>Call this for every message of this class, on the reader's thread: one at a
        /// time, in the order in which they come. If it throws, the message comes again.</summary>
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

        // What the link asks for -----------------------------------------------------------------

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
                    // Not acknowledged, it comes again. The handlers behind this one are not
                    // deprived.
                    good = false;
                    if (options.Log != null)
                        options.Log(
                            "a handler failed on message " + frame.MessageId + " of class "
                            + frame.ClassId + ", which will come again: " + error.Message);
                }
            }
            return good;
        }

        // Helpers --------------------------------------------------------------------------------

        private Binding BindingOf(Type type)
        {
            Binding binding;
            if (!bindings.TryGetValue(type, out binding))
                throw new InvalidOperationException(type + " is not bound to a class");
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
