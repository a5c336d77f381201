using System;
using System.IO;
using System.Net.Security;
using System.Security.Cryptography;
using System.Security.Cryptography.X509Certificates;

namespace SimpleBus.Client.Connection
{
    /// <summary>Check of a server certificate against certificate authorities from a PEM file.</summary>
    internal sealed class CertificateCheck
    {
        private const string Begin = "-----BEGIN CERTIFICATE-----";
        private const string End = "-----END CERTIFICATE-----";
        private const string ServerAuthentication = "1.3.6.1.5.5.7.3.1"; // Extended key usage of servers.

        private readonly X509Certificate2Collection _authorities = new X509Certificate2Collection();

        /// <exception cref="ArgumentException">The file has no certificate.</exception>
        public CertificateCheck(string file)
        {
            string text = File.ReadAllText(file);
            int at = 0;
            while ((at = text.IndexOf(Begin, at, StringComparison.Ordinal)) >= 0)
            {
                int end = text.IndexOf(End, at, StringComparison.Ordinal);
                if (end < 0)
                    break;
                string encoded = text.Substring(at + Begin.Length, end - at - Begin.Length);
                _authorities.Add(new X509Certificate2(Convert.FromBase64String(encoded)));
                at = end;
            }
            if (_authorities.Count == 0)
                throw new ArgumentException($"{file} contains no PEM certificate");
        }

        /// <summary>Return true if the chain ends at one of the authorities and has no other error.</summary>
        public bool IsValid(object sender, X509Certificate? certificate, X509Chain? received, SslPolicyErrors errors)
        {
            if (certificate == null || (errors & ~SslPolicyErrors.RemoteCertificateChainErrors) != 0)
                return false;
            using X509Chain chain = new X509Chain();
            chain.ChainPolicy.RevocationMode = X509RevocationMode.NoCheck;
            chain.ChainPolicy.ApplicationPolicy.Add(new Oid(ServerAuthentication));
            chain.ChainPolicy.ExtraStore.AddRange(_authorities);
            if (received != null) // The chain has the intermediate certificates that the server sent.
                foreach (X509ChainElement element in received.ChainElements)
                    chain.ChainPolicy.ExtraStore.Add(element.Certificate);
            // .NET before version 5 has no setting for the trusted roots, so the root is compared below.
            chain.ChainPolicy.VerificationFlags = X509VerificationFlags.AllowUnknownCertificateAuthority;
            using X509Certificate2 leaf = new X509Certificate2(certificate);
            if (!chain.Build(leaf))
                return false;
            X509Certificate2 root = chain.ChainElements[chain.ChainElements.Count - 1].Certificate;
            foreach (X509Certificate2 authority in _authorities)
                if (root.RawData.AsSpan().SequenceEqual(authority.RawData))
                    return true;
            return false;
        }
    }
}
