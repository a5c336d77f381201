using System;

namespace SimpleBus.Client.Connection
{
    /// <summary>Address of a server.</summary>
    internal readonly struct BusAddress
    {
        private const int DefaultPort = 8888;
        private const string Scheme = "simplebus";
        private const string SecureScheme = "simplebuss";

        public readonly string Host;
        public readonly int Port;

        /// <summary>True to connect with TLS.</summary>
        public readonly bool IsSecure;

        private BusAddress(string host, int port, bool isSecure)
        {
            Host = host;
            Port = port;
            IsSecure = isSecure;
        }

        /// <exception cref="ArgumentException">The text is not an address.</exception>
        public static BusAddress Parse(string text)
        {
            if (text == null)
                throw new ArgumentNullException(nameof(text));
            string complete = text.Contains("://", StringComparison.Ordinal) ? text : $"{Scheme}://{text}";
            if (!Uri.TryCreate(complete, UriKind.Absolute, out Uri? uri)
                || uri == null || (uri.Scheme != Scheme && uri.Scheme != SecureScheme)
                || uri.Host.Length == 0 || uri.Port == 0 || uri.UserInfo.Length > 0
                || uri.AbsolutePath.Trim('/').Length > 0 || uri.Query.Length > 0 || uri.Fragment.Length > 0)
                throw new ArgumentException(
                    "an address is simplebus://host:port, simplebuss://host:port for TLS, or host:port; "
                    + "user and password are options");
            return new BusAddress(
                uri.Host.Trim('[', ']'), uri.Port < 0 ? DefaultPort : uri.Port, uri.Scheme == SecureScheme);
        }

        public override string ToString() => $"{(IsSecure ? SecureScheme : Scheme)}://{Host}:{Port}";
    }
}
