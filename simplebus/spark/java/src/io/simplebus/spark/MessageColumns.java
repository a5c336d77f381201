package io.simplebus.spark;

import io.simplebus.client.Frames;
import java.util.Arrays;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.unsafe.types.UTF8String;

/** Columns that read a {@link MessageBlock}. They stay the same while the block changes. */
final class MessageColumns {
    private MessageColumns() {}

    /**
     * Returns the columns of a schema.
     *
     * @param partition the task, with the values that are equal in all its rows
     */
    static ColumnVector[] create(StructType schema, MessagePartition partition, MessageBlock block) {
        return Arrays.stream(schema.fields())
                .map(field -> create(field.name(), field.dataType(), partition, block))
                .toArray(ColumnVector[]::new);
    }

    private static ColumnVector create(
            String name, DataType type, MessagePartition partition, MessageBlock block) {
        MessageRange range = partition.range();
        return switch (name) {
            case ColumnNames.KEY -> new OptionalColumn(type, block, block.keys());
            case ColumnNames.VALUE -> new BytesColumn(type, block, block.values());
            case ColumnNames.TOPIC -> new TextColumn(range.className());
            case ColumnNames.PARTITION -> new IntegerColumn(partition.classId());
            case ColumnNames.OFFSET -> new OffsetColumn(block);
            case ColumnNames.TIMESTAMP -> new TimestampColumn(block);
            case ColumnNames.TIMESTAMP_TYPE -> new TimestampTypeColumn(block);
            case ColumnNames.CHANNEL -> new OptionalColumn(type, block, block.channels());
            case ColumnNames.SERVER -> new TextColumn(range.server());
            case ColumnNames.HEADERS -> new HeadersColumn(type, block);
            case ColumnNames.MEMORY -> new TextColumn(range.memoryId());
            default -> throw new IllegalArgumentException("there is no column " + name);
        };
    }

    /** Bytes or text of each message. */
    private static class BytesColumn extends MessageColumn {
        final MessageBlock block;
        final Slices slices;

        BytesColumn(DataType type, MessageBlock block, Slices slices) {
            super(type);
            this.block = block;
            this.slices = slices;
        }

        @Override
        public byte[] getBinary(int row) {
            return Arrays.copyOfRange(block.bytes(), slices.begins[row], slices.ends[row]);
        }

        @Override
        public UTF8String getUTF8String(int row) {
            int begin = slices.begins[row];
            return UTF8String.fromBytes(block.bytes(), begin, slices.ends[row] - begin);
        }
    }

    /** Bytes or text that messages may lack. */
    private static final class OptionalColumn extends BytesColumn {
        OptionalColumn(DataType type, MessageBlock block, Slices slices) {
            super(type, block, slices);
        }

        @Override
        public boolean hasNull() {
            return true;
        }

        @Override
        public int numNulls() {
            return block.hasEnvelopes() ? 1 : block.count();
        }

        @Override
        public boolean isNullAt(int row) {
            return !block.hasEnvelopes() || slices.isEmpty(row);
        }

        @Override
        public byte[] getBinary(int row) {
            return isNullAt(row) ? null : super.getBinary(row);
        }

        @Override
        public UTF8String getUTF8String(int row) {
            return isNullAt(row) ? null : super.getUTF8String(row);
        }
    }

    private static final class TextColumn extends MessageColumn {
        private final UTF8String text;

        TextColumn(String text) {
            super(DataTypes.StringType);
            this.text = UTF8String.fromString(text);
        }

        @Override
        public UTF8String getUTF8String(int row) {
            return text;
        }
    }

    private static final class IntegerColumn extends MessageColumn {
        private final int number;

        IntegerColumn(int number) {
            super(DataTypes.IntegerType);
            this.number = number;
        }

        @Override
        public int getInt(int row) {
            return number;
        }
    }

    private static final class OffsetColumn extends MessageColumn {
        private final MessageBlock block;

        OffsetColumn(MessageBlock block) {
            super(DataTypes.LongType);
            this.block = block;
        }

        @Override
        public long getLong(int row) {
            return block.sequence(row);
        }
    }

    private static final class TimestampColumn extends MessageColumn {
        private final MessageBlock block;

        TimestampColumn(MessageBlock block) {
            super(DataTypes.TimestampType);
            this.block = block;
        }

        @Override
        public long getLong(int row) {
            return block.timestamp(row);
        }
    }

    private static final class TimestampTypeColumn extends MessageColumn {
        private final MessageBlock block;

        TimestampTypeColumn(MessageBlock block) {
            super(DataTypes.IntegerType);
            this.block = block;
        }

        @Override
        public int getInt(int row) {
            return block.timestampType(row);
        }
    }

    /** Headers of each message, which are decoded when they are read. */
    private static final class HeadersColumn extends MessageColumn {
        private static final int LENGTH_BYTES = 2;

        private final MessageBlock block;
        private final StructType header;

        HeadersColumn(DataType type, MessageBlock block) {
            super(type);
            this.block = block;
            this.header = (StructType) ((ArrayType) type).elementType();
        }

        @Override
        public boolean hasNull() {
            return true;
        }

        @Override
        public int numNulls() {
            return block.hasEnvelopes() ? 1 : block.count();
        }

        @Override
        public boolean isNullAt(int row) {
            return !block.hasEnvelopes() || block.headers().isEmpty(row);
        }

        @Override
        public ColumnarArray getArray(int row) {
            if (isNullAt(row)) {
                return null;
            }
            byte[] bytes = block.bytes();
            int end = block.headers().ends[row];
            int capacity = 1 + (end - block.headers().begins[row]) / (2 * LENGTH_BYTES);
            Slices names = new Slices(capacity);
            Slices values = new Slices(capacity);
            int count = 0;
            int at = block.headers().begins[row];
            while (at < end) {
                int nameBegin = at + LENGTH_BYTES;
                int nameEnd = nameBegin + Frames.readShort(bytes, at);
                int valueBegin = nameEnd + LENGTH_BYTES;
                int valueEnd = valueBegin + Frames.readShort(bytes, nameEnd);
                names.set(count, nameBegin, nameEnd);
                values.set(count, valueBegin, valueEnd);
                at = valueEnd;
                count++;
            }
            return new ColumnarArray(new HeaderColumn(header, block, names, values), 0, count);
        }
    }

    /** Names and values of the headers of one message. */
    private static final class HeaderColumn extends MessageColumn {
        private final ColumnVector[] children;

        HeaderColumn(StructType type, MessageBlock block, Slices names, Slices values) {
            super(type);
            children =
                    new ColumnVector[] {
                        new BytesColumn(DataTypes.StringType, block, names),
                        new BytesColumn(DataTypes.BinaryType, block, values)
                    };
        }

        @Override
        public ColumnVector getChild(int ordinal) {
            return children[ordinal];
        }
    }
}
