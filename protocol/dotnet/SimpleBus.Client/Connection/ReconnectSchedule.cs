using System;
using System.Collections.Generic;

namespace SimpleBus.Client.Connection
{
    /// <summary>
    /// Schedule of connection attempts. Time and random numbers are arguments.
    /// <para>The addresses are tried in rounds, starting with the one that worked last. The delay between rounds
    /// doubles up to a maximum and is shortened by up to a half at random, so that many clients do not reconnect at the
    /// same moment.</para>
    /// </summary>
    internal sealed class ReconnectSchedule
    {
        public const double DelayMinSeconds = 0.05;
        public const double DelayMaxSeconds = 5.0;

        /// <summary>A connection that lasted this long resets the backoff.</summary>
        public const double StableSeconds = 5.0;

        private static readonly HashSet<string> TemporaryCodes = new HashSet<string>
        {
            "draining", "frame_timeout", "heartbeat_timeout", "hello_timeout", "pending_limit", "stalled",
            "too_many_attempts", "too_many_connections",
        };

        private readonly int _addressCount;
        private int _firstAddress;
        private int _roundOffset;
        private int _failedRounds;

        public ReconnectSchedule(int addressCount)
        {
            _addressCount = addressCount;
        }

        /// <summary>Return whether another attempt may succeed after an error with this code, or without one.</summary>
        public static bool IsTemporary(string? code) => code == null || TemporaryCodes.Contains(code);

        /// <summary>Return the seconds to wait after a failure that followed <paramref name="earlierFailures"/> others.</summary>
        public static double DelaySeconds(int earlierFailures, double randomFraction) =>
            Math.Min(DelayMinSeconds * Math.Pow(2, Math.Min(earlierFailures, 32)), DelayMaxSeconds)
            * (1 - (randomFraction / 2));

        /// <summary>Note a connection to the address of the last attempt.</summary>
        public void MarkConnected()
        {
            _firstAddress = (_firstAddress + _roundOffset + _addressCount - 1) % _addressCount;
            _roundOffset = 0;
        }

        /// <summary>Note that the connection is lost after <paramref name="connectedSeconds"/>.</summary>
        public void MarkLost(double connectedSeconds)
        {
            _failedRounds = connectedSeconds >= StableSeconds ? 0 : _failedRounds + 1;
            _roundOffset = 0;
        }

        /// <summary>Return the index of the next address, and the seconds to wait before trying it.</summary>
        public (int Address, double DelaySeconds) NextAttempt(double randomFraction)
        {
            if (_roundOffset == _addressCount)
            {
                _roundOffset = 0;
                _failedRounds++;
            }
            double delay = _failedRounds > 0 && _roundOffset == 0 ? DelaySeconds(_failedRounds - 1, randomFraction) : 0;
            int address = (_firstAddress + _roundOffset) % _addressCount;
            _roundOffset++;
            return (address, delay);
        }
    }
}
