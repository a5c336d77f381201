"""Load: the runs behind every performance claim of simplebus.

    python load/run.py            every scenario, about ten minutes
    python load/run.py --quick    the same, short and rough
    python load/run.py flow-16    one scenario

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
    client_loops.py  the measurements of the Python client, message by message
    client_worker.py the programs that they time
    report.py      medians, spreads, the table and the JSON
    chart.py       rps.png
    canary.py      a broker that fails on purpose: the generator must notice
    lab/           experiments that lost, still runnable
"""
