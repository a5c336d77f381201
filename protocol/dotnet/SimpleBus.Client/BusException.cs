using System;

namespace SimpleBus.Client
{
    /// <summary>Base class of the errors of a bus.</summary>
    public class BusException : Exception
    {
        /// <summary>Create an error.</summary>
        /// <param name="message">Description of the error.</param>
        /// <param name="code">Reason code of the server, such as <c>unauthorized</c>.</param>
        /// <param name="innerException">Cause of the error.</param>
        public BusException(string message, string? code = null, Exception? innerException = null)
            : base(message, innerException)
        {
            Code = code;
        }

        /// <summary>
        /// Reason code of the server, such as <c>unauthorized</c>; null if the error is not from the server. The page
        /// "The binary protocol" lists all codes.
        /// </summary>
        public string? Code { get; }
    }

    /// <summary>No server can be reached, or the connection is lost for good. <see cref="BusException.Code"/> has
    /// the reason if a server refused the client.</summary>
    public sealed class BusConnectionException : BusException
    {
        /// <summary>Create an error.</summary>
        /// <param name="message">Description of the error.</param>
        /// <param name="code">Reason code of the server.</param>
        /// <param name="innerException">Cause of the error.</param>
        public BusConnectionException(string message, string? code = null, Exception? innerException = null)
            : base(message, code, innerException)
        {
        }
    }

    /// <summary>The server refused a message or a request. The connection continues.</summary>
    public sealed class RefusedException : BusException
    {
        /// <summary>Create an error.</summary>
        /// <param name="message">Description of the error.</param>
        /// <param name="code">Reason code of the server.</param>
        /// <param name="refusedCount">Number of refused messages.</param>
        public RefusedException(string message, string code, int refusedCount = 1)
            : base(message, code)
        {
            RefusedCount = refusedCount;
        }

        /// <summary>Number of refused messages of the call; the others are stored.</summary>
        public int RefusedCount { get; }
    }
}
