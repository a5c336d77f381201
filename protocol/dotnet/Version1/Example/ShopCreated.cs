// A message type: its fields, and their encoding in protobuf's wire format.
//
//   message ShopCreated { int64 id = 1; string name = 2; }

using System;

namespace SimpleBus.Version1.Example
{
    public sealed class ShopCreated
    {
        public const ushort ClassId = 1;

        public long Id;
        public string Name = "";

        public static byte[] Encode(ShopCreated shop)
        {
            return new ProtobufWriter().Int64(1, shop.Id).String(2, shop.Name).ToArray();
        }

        public static ShopCreated Decode(ArraySegment<byte> payload)
        {
            ShopCreated shop = new ShopCreated();
            ProtobufReader reader = new ProtobufReader(payload);
            while (reader.Next())
            {
                if (reader.Field == 1)
                    shop.Id = reader.Int64();
                else if (reader.Field == 2)
                    shop.Name = reader.String();
                else
                    reader.Skip();
            }
            return shop;
        }
    }
}
