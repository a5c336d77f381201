using System.Collections.Concurrent;
using System.Collections.Generic;

namespace SimpleBus.Client.Connection
{
    /// <summary>Classes that this client has named to the server. Thread-safe.</summary>
    internal sealed class ClassRegistry
    {
        private readonly ConcurrentDictionary<string, ushort> _idByName = new ConcurrentDictionary<string, ushort>();
        private readonly ConcurrentDictionary<ushort, string?> _nameById = new ConcurrentDictionary<ushort, string?>();

        public void Add(ClassReference named, ushort id)
        {
            if (named.Name != null)
                _idByName[named.Name] = id;
            _nameById[id] = named.Name ?? (_nameById.TryGetValue(id, out string? name) ? name : null);
        }

        /// <summary>Return the id of a class, if it was named to the server.</summary>
        public bool TryGetId(ClassReference named, out ushort id)
        {
            if (named.Name != null)
                return _idByName.TryGetValue(named.Name, out id);
            id = (ushort)(named.Id ?? 0);
            return _nameById.ContainsKey(id);
        }

        /// <summary>Return all classes with id and name, for the next Connect.</summary>
        public List<ClassReference> ToList()
        {
            List<ClassReference> classes = new List<ClassReference>();
            foreach (KeyValuePair<ushort, string?> entry in _nameById)
                classes.Add(new ClassReference(entry.Value, entry.Key));
            return classes;
        }
    }
}
