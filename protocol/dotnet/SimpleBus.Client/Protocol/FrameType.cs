namespace SimpleBus.Client.Protocol
{
    /// <summary>Frame types of protocol version 2.</summary>
    internal static class FrameType
    {
        public const byte Heartbeat = (byte)'0';
        public const byte Message = (byte)'1';
        public const byte Subscribe = (byte)'2';
        public const byte Ack = (byte)'3';
        public const byte Connect = (byte)'4';
        public const byte Envelope = (byte)'5';
        public const byte Confirm = (byte)'6';
        public const byte Deliver = (byte)'7';
        public const byte Nack = (byte)'8';
        public const byte Working = (byte)'9';
        public const byte Unsubscribe = (byte)'U';
        public const byte Inquire = (byte)'I';
        public const byte Error = (byte)'E';
    }
}
