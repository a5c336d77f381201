using System;

namespace SimpleBus.Client
{
    /// <summary>
    /// A message class, by its name or its id. Strings and integers convert to it, so calls accept
    /// <c>"orders"</c> or <c>7</c>.
    /// </summary>
    public readonly struct ClassReference : IEquatable<ClassReference>
    {
        private const int NameCharactersMax = 200;

        /// <summary>Refer to a class by name.</summary>
        /// <param name="name">Name of 1 to 200 characters.</param>
        public ClassReference(string name)
        {
            if (name == null)
                throw new ArgumentNullException(nameof(name));
            if (name.Length < 1 || name.Length > 2 * NameCharactersMax)
                throw new ArgumentException($"a class name has 1 to {NameCharactersMax} characters", nameof(name));
            Name = name;
            Id = null;
        }

        /// <summary>Refer to a class by id.</summary>
        /// <param name="id">Id from 0 to 65535.</param>
        public ClassReference(int id)
        {
            if (id < 0 || id > ushort.MaxValue)
                throw new ArgumentOutOfRangeException(nameof(id), id, "a class id is from 0 to 65535");
            Name = null;
            Id = (ushort)id;
        }

        internal ClassReference(string? name, ushort id)
        {
            Name = name;
            Id = id;
        }

        /// <summary>Name of the class; null if it is referred to by id.</summary>
        public string? Name { get; }

        /// <summary>Id of the class; null if it is referred to by name.</summary>
        public int? Id { get; }

        /// <summary>Refer to a class by name.</summary>
        /// <param name="name">Name of the class.</param>
        public static implicit operator ClassReference(string name) => new ClassReference(name);

        /// <summary>Refer to a class by id.</summary>
        /// <param name="id">Id of the class.</param>
        public static implicit operator ClassReference(int id) => new ClassReference(id);

        /// <inheritdoc/>
        public bool Equals(ClassReference other) => Name == other.Name && Id == other.Id;

        /// <inheritdoc/>
        public override bool Equals(object? obj) => obj is ClassReference other && Equals(other);

        /// <inheritdoc/>
        public override int GetHashCode() => Name != null ? Name.GetHashCode(StringComparison.Ordinal) : Id ?? -1;

        /// <inheritdoc/>
        public override string ToString() => Name != null ? $"'{Name}'" : $"{Id}";

        /// <summary>Compare two references.</summary>
        /// <param name="left">First reference.</param>
        /// <param name="right">Second reference.</param>
        public static bool operator ==(ClassReference left, ClassReference right) => left.Equals(right);

        /// <summary>Compare two references.</summary>
        /// <param name="left">First reference.</param>
        /// <param name="right">Second reference.</param>
        public static bool operator !=(ClassReference left, ClassReference right) => !left.Equals(right);
    }
}
