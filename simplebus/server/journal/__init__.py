"""The journal of a running server: threads that write and read its files.

- `pump`: `JournalPump` moves write batches from the event loop to the writer thread; `load`
  recovers a broker from the files at start, before the threads run
- `writer`: `JournalWriter`, the thread that writes and syncs
- `spill_read_thread`: `SpillReadThread`, the thread that reads spilled messages back

May import: core, logs and storage.
"""
