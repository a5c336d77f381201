"""Journal: files that keep classes, durables and messages across restarts.

    file_names        names of the files and directories
    errors            exceptions
    append_file       file that grows at its end
    records           record format
    directory         the journal's directory: format, identity and lock
    disk_reserve      disk space for removals on a full disk
    journal           writes write batches, syncs them, removes segments
    segments          reads segments and state files, and reports damage
    recovery          rebuilds a broker from the files
    segment_reader    reads spilled messages back
    journal_reader    reads a class while a server writes it
    inspection        contents of a journal for `simplebus journal`

May import `core`.
"""
