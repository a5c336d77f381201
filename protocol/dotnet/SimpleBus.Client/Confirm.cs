namespace SimpleBus.Client
{
    /// <summary>Durability of a stored message.</summary>
    public enum Durability
    {
        /// <summary>In the memory of the server: lost if the server ends.</summary>
        Memory = 0,

        /// <summary>Handed to the operating system: survives a crash of the server.</summary>
        OperatingSystem = 1,

        /// <summary>Synchronized to disk: survives a power cut.</summary>
        Disk = 2,
    }

    /// <summary>Answer of the server that it has stored a message.</summary>
    public readonly struct Confirm
    {
        internal Confirm(Durability durability)
        {
            Durability = durability;
        }

        /// <summary>Durability that the message has at least.</summary>
        public Durability Durability { get; }
    }
}
