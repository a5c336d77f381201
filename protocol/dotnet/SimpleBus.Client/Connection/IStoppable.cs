using System.Threading;
using System.Threading.Tasks;

namespace SimpleBus.Client.Connection
{
    /// <summary>Consumer of messages that a drain stops.</summary>
    internal interface IStoppable
    {
        /// <summary>Take no more messages, and wait until the present ones are processed.</summary>
        Task StopAsync(CancellationToken cancellationToken);
    }
}
