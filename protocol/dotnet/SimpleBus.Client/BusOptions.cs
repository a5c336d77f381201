using System;
using System.Collections.Generic;

namespace SimpleBus.Client
{
    /// <summary>Settings of a <see cref="Bus"/>.</summary>
    public sealed class BusOptions
    {
        private static readonly TimeSpan HeartbeatMax = TimeSpan.FromHours(1);

        /// <summary>
        /// Publisher name, by which the server recognizes messages that are sent again after a lost connection. One
        /// connection at a time has a name: connecting is retried for somewhat more than three heartbeats while the name is
        /// in use. Null for a random one.
        /// </summary>
        public string? Name { get; set; }

        /// <summary>Classes to name when connecting. Other classes are named when they are first used.</summary>
        public ICollection<ClassReference> Classes { get; private set; } = new List<ClassReference>();

        /// <summary>User name, together with <see cref="Password"/>.</summary>
        public string? User { get; set; }

        /// <summary>Password of <see cref="User"/>.</summary>
        public string? Password { get; set; }

        /// <summary>Token, instead of user and password.</summary>
        public string? Token { get; set; }

        /// <summary>TLS settings, for addresses that begin with <c>simplebuss://</c>.</summary>
        public TlsOptions Tls { get; set; } = new TlsOptions();

        /// <summary>Time that connecting may take.</summary>
        public TimeSpan ConnectTimeout { get; set; } = TimeSpan.FromSeconds(5);

        /// <summary>
        /// Time during which a lost connection is replaced. <see cref="System.Threading.Timeout.InfiniteTimeSpan"/> for
        /// ever, zero never.
        /// </summary>
        public TimeSpan ReconnectTimeout { get; set; } = TimeSpan.FromSeconds(60);

        /// <summary>
        /// Silence after which the connection is tested, at most one hour. Zero or
        /// <see cref="System.Threading.Timeout.InfiniteTimeSpan"/> leave it to the server.
        /// </summary>
        public TimeSpan Heartbeat { get; set; } = TimeSpan.FromSeconds(10);

        /// <summary>Time that <see cref="Bus.DisposeAsync"/> waits for handlers, and then for confirms.</summary>
        public TimeSpan CloseTimeout { get; set; } = TimeSpan.FromSeconds(10);

        /// <summary>Bytes of unconfirmed messages above which publishing waits.</summary>
        public long UnconfirmedBytesMax { get; set; } = 16 * 1024 * 1024;

        /// <summary>Conversion of values to payloads and back; JSON by default. Bytes are never converted.</summary>
        public IBusSerializer Serializer { get; set; } = new JsonBusSerializer();

        /// <summary>
        /// Receives log entries. With Microsoft.Extensions.Logging:
        /// <c>Log = (level, text, error) => logger.Log((LogLevel)level, error, text)</c>.
        /// </summary>
        public Action<BusLogLevel, string, Exception?>? Log { get; set; }

        /// <summary>Return a copy, which does not change if the program changes these options later.</summary>
        /// <exception cref="ArgumentException">A value is out of its range.</exception>
        internal BusOptions CopyValid()
        {
            CheckTime(ConnectTimeout, nameof(ConnectTimeout), isZeroAllowed: false);
            CheckTime(ReconnectTimeout, nameof(ReconnectTimeout));
            CheckTime(Heartbeat, nameof(Heartbeat));
            CheckTime(CloseTimeout, nameof(CloseTimeout));
            if (Heartbeat > HeartbeatMax)
                throw new ArgumentOutOfRangeException(nameof(Heartbeat), Heartbeat, "expected one hour or less, or infinite");
            if (CloseTimeout.TotalMilliseconds > int.MaxValue)
                throw new ArgumentOutOfRangeException(
                    nameof(CloseTimeout), CloseTimeout, $"expected {int.MaxValue} ms or less, or infinite");
            if (UnconfirmedBytesMax <= 0)
                throw new ArgumentOutOfRangeException(
                    nameof(UnconfirmedBytesMax), UnconfirmedBytesMax, "expected one byte or more");
            if (Tls == null)
                throw new ArgumentNullException(nameof(Tls), "expected TLS settings");
            if (Serializer == null)
                throw new ArgumentNullException(nameof(Serializer), "expected a serializer");
            BusOptions copy = (BusOptions)MemberwiseClone();
            copy.Classes = new List<ClassReference>(Classes);
            if (Heartbeat == System.Threading.Timeout.InfiniteTimeSpan)
                copy.Heartbeat = TimeSpan.Zero;
            return copy;
        }

        private static void CheckTime(TimeSpan time, string name, bool isZeroAllowed = true)
        {
            if (time == System.Threading.Timeout.InfiniteTimeSpan || time > TimeSpan.Zero
                || (isZeroAllowed && time == TimeSpan.Zero))
                return;
            throw new ArgumentOutOfRangeException(
                name, time, isZeroAllowed ? "expected zero or more, or infinite" : "expected more than zero, or infinite");
        }
    }
}
