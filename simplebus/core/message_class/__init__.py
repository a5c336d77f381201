"""Message classes: one ring, its positions, its backlog and its limits per class.

Modules in reading order:
    message_class       one class: ring, positions, backlog, floor
    floor_index         lowest floor of a class's positions
    last_values         newest message of each channel
    purge               removal of stored messages for every position
    class_ids           ids and names that refer to classes
    class_registry      all classes of a bus by id and name, and their settings
    subject_bindings    NATS subjects whose messages are stored in classes
    stored_frames       frames read from the journal, as batches for a ring
    spill               classes larger than memory, read back from disk
    remote_storage      classes whose messages are stored by another system

Imports `group`, `subscription`, `session`, `ring`, `redelivery`, `channel`, `users` and `protocol`.
"""
