namespace SimpleBus.Client
{
    /// <summary>Severity of a log entry, with the values of Microsoft.Extensions.Logging.LogLevel.</summary>
    public enum BusLogLevel
    {
        /// <summary>Details for developers of the client.</summary>
        Debug = 1,

        /// <summary>Connections and their ends.</summary>
        Information = 2,

        /// <summary>Losses that the client repairs, and handlers that failed.</summary>
        Warning = 3,

        /// <summary>The bus has ended.</summary>
        Error = 4,
    }
}
