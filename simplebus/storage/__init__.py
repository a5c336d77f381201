"""Journal: files that keep classes, durables and messages across restarts.

    file_names        names of the files and directories
    errors            exceptions
    append_file       file that grows at its end
    records           record format
    directory         the journal's directory: format, identity and lock
    disk_reserve      disk space for removals on a full disk

Writer:
    journal           writes write batches, syncs them, removes segments

Readers:
    segments          reads segments and state files, and reports damage; `RecoveryResult`
    recovery          at start: rebuilds a broker from the files (`recover`)
    segment_reader    in a running server: reads spilled messages back
    journal_reader    in another process: reads a class while a server writes it

    inspection        contents of a journal for `simplebus journal`
    repair            moves damaged bytes out of files, and records gaps
    backup            copies a journal that a server may be using, and restores copies

`server.journal` runs `journal` and `segment_reader` in threads, and calls `recovery` in
`pump.load`. May import `core`.
"""
