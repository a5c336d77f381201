using System.Net.Security;
using System.Security.Cryptography.X509Certificates;

namespace SimpleBus.Client
{
    /// <summary>TLS settings of a connection.</summary>
    public sealed class TlsOptions
    {
        /// <summary>
        /// PEM file with the certificate authorities that may have signed the server's certificate. Null for those of
        /// the operating system.
        /// </summary>
        public string? CaFile { get; set; }

        /// <summary>Certificate of the client with its private key, for servers that require one.</summary>
        public X509Certificate2? ClientCertificate { get; set; }

        /// <summary>Name that the server's certificate must have. Null for the host of the address.</summary>
        public string? ServerName { get; set; }

        /// <summary>Replaces the check of the server's certificate.</summary>
        public RemoteCertificateValidationCallback? RemoteCertificateValidation { get; set; }
    }
}
