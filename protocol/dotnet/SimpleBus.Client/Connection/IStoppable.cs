using System.Threading;
using System.Threading.Tasks;

namespace SimpleBus.Client.Connection
{
    /// <summary>Consumer of messages that a drain stops.</summary>
    internal interface IStoppable
    {
        /// <summary>Receive no more messages, and wait until those being processed are finished.</summary>
        Task StopAsync(CancellationToken cancellationToken);
    }
}
