"""Load: the runs behind every performance claim of simplebus.

    python load/run.py            every scenario but the next three, about ten minutes
    python load/run.py kills      200 servers killed under load, some with the power cut
    python load/run.py partitions bridges over a line that loses packets and is cut (needs root)
    python load/run.py soak       random work for minutes, or hours: does memory stay flat
    python load/run.py --quick    the same, short and rough
    python load/run.py flow-16    one scenario
    python load/run.py 'nats-*'   the NATS door, beside nats-server
    python load/run.py --traces DIR; simplebus pipeline report DIR --chart rps.png

Law: ratios, not absolute figures, are the claims. A peer is measured in the same run, in turn with
simplebus, by the same generator, and no rate is printed for work that was not verified.

    generator/     the load generator (C): publishes, verifies, acknowledges, times
    generators.py  compiles it when needed and starts it
    processes.py   a child process: its lines, CPU time, memory and end
    brokers.py     starts and stops simplebus and its peers
    jetstream.py   makes and removes the streams that JetStream needs
    measure.py     one measurement
    scenarios.py   what is measured, against what, and what is wanted
    memory.py      the measurements of memory
    bridge.py      those of bridges: from bus to bus, and to NATS
    nats_door.py   those of the NATS door: idle connections, and many subscriptions
    sdk.py         the measurements of Python programs, of simplebus and of nats-py
    sdk_job.py     what such a program is told, and how it answers
    sdk_worker.py  the programs of simplebus
    sdk_peer.py    those of nats-py
    matching.py    how long a match takes and what a subscription costs
    report.py      medians, spreads, the table and the JSON
    traces.py      what generators wrote down, for `simplebus pipeline report`, which draws rps.png
    disk/          a library for servers (C): a slower disk, and what a power cut leaves of one
    power.py       cuts the power of a directory
    kills.py       servers killed under load, and what becomes of what was confirmed
    partitions.py  bridges over a bad line, and killed ends: what is lost, twice, out of order
    line.py        two networks and what is between them: delay, loss, cuts
    accounts.py    the books of such a run: what is lost, twice, or out of its turn
    soak.py        random work for hours: does memory stay flat
    canary.py      a broker that fails on purpose: the generator must notice
    canary_nats.py a NATS server that does
    lab/           experiments that lost, still runnable
"""
