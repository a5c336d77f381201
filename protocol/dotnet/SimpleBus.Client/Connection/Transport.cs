using System;
using System.IO;
using System.Net.Security;
using System.Net.Sockets;
using System.Security.Authentication;
using System.Security.Cryptography.X509Certificates;
using System.Threading;
using System.Threading.Tasks;

namespace SimpleBus.Client.Connection
{
    /// <summary>Byte stream to a server: a socket, with TLS if the address asks for it.</summary>
    internal sealed class Transport : IDisposable
    {
        private readonly Socket _socket;
        private readonly Stream _stream;

        private Transport(Socket socket, Stream stream)
        {
            _socket = socket;
            _stream = stream;
        }

        /// <summary>Connect to a server. Cancellation closes the socket.</summary>
        public static async Task<Transport> ConnectAsync(
            BusAddress address, TlsOptions tls, CancellationToken cancellationToken)
        {
            // Without an address family it uses both IPv6 and IPv4.
            Socket socket = new Socket(SocketType.Stream, ProtocolType.Tcp) { NoDelay = true };
            try
            {
                using (cancellationToken.Register(socket.Dispose))
                {
                    await socket.ConnectAsync(address.Host, address.Port).ConfigureAwait(false);
                    socket.SetSocketOption(SocketOptionLevel.Socket, SocketOptionName.KeepAlive, true);
                    Stream stream = new NetworkStream(socket, ownsSocket: true);
                    if (address.IsSecure)
                        stream = await StartTlsAsync(stream, address.Host, tls).ConfigureAwait(false);
                    return new Transport(socket, stream);
                }
            }
            catch (Exception error)
            {
                socket.Dispose();
                if (cancellationToken.IsCancellationRequested)
                    throw new OperationCanceledException("connecting was cancelled", error, cancellationToken);
                throw;
            }
        }

        public ValueTask<int> ReadAsync(Memory<byte> buffer) => _stream.ReadAsync(buffer);

        public ValueTask WriteAsync(ReadOnlyMemory<byte> bytes) => _stream.WriteAsync(bytes);

        /// <summary>End the stream to the server, which closes when it has read everything.</summary>
        public async Task ShutdownAsync()
        {
            if (_stream is SslStream tls)
                await tls.ShutdownAsync().ConfigureAwait(false);
            _socket.Shutdown(SocketShutdown.Send);
        }

        public void Dispose() => _stream.Dispose();

        private static async Task<Stream> StartTlsAsync(Stream stream, string host, TlsOptions options)
        {
            RemoteCertificateValidationCallback? check = options.RemoteCertificateValidation;
            if (check == null && options.CaFile != null)
                check = new CertificateCheck(options.CaFile).IsValid;
            SslStream secure = new SslStream(stream, leaveInnerStreamOpen: false, check);
            X509CertificateCollection? certificates = options.ClientCertificate == null
                ? null : new X509CertificateCollection { options.ClientCertificate };
            // None lets the operating system choose the version.
            await secure.AuthenticateAsClientAsync(
                options.ServerName ?? host, certificates, SslProtocols.None, checkCertificateRevocation: false)
                .ConfigureAwait(false);
            return secure;
        }
    }
}
