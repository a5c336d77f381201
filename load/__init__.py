"""Load programs: the measurements behind every performance figure of simplebus.

    python load/run.py            every scenario except the long ones, more than half an hour
    python load/run.py kills      200 servers killed under load, some with a power cut
    python load/run.py partitions bridges over a network with loss and cuts (needs root)
    python load/run.py soak       random work for minutes or hours: does memory stay flat?
    python load/run.py --quick    every scenario, short and imprecise
    python load/run.py flow-16    one scenario
    python load/run.py 'nats-*'   the NATS listener against nats-server
    python load/run.py requests confirmed one-way v1-latency cpu    one message at a time
    python load/run.py --traces DIR; simplebus pipeline report DIR --chart rps.png

Claims are ratios, not absolute figures: a peer is measured in the same run, in turn with simplebus,
by the same generator. No rate is printed for work that was not verified.

    run.py                   command line; runs scenarios and prints the report
    scenarios.py             table of scenarios, variants and targets
    measure.py               one measurement: a flow or round trips of the generator
    report.py                medians, spreads, the tables and the JSON
    traces.py                traces of generators, for `simplebus pipeline report`
    generator/               the load generator (C): publishes, verifies, acks, times
    generators.py            compiles and starts the load generator
    processes.py             child process: output lines, CPU time, memory, end
    brokers.py               starts and stops simplebus and its peers
    jetstream.py             creates and removes streams of JetStream
    ports.py, certificates.py    free ports; a TLS certificate

    memory.py                server memory: idle, per message, per connection
    bridge.py                rates of bridges: bus to bus, and bus to NATS
    nats_scaling.py          NATS listener: idle connections and many subscriptions
    durability.py            confirm latency, backlogs and redelivery
    connections.py           ten thousand connections
    monitor.py               cost of metrics scrapes and the live page
    tls_and_permissions.py   cost of TLS and permissions; permission_cost.py measures the core alone
    connection_attack.py     latency of a client while others attack the server
    attacks.py               latency of a client while others send many legal requests
    stalled_reader.py        a client of version 1 that stops reading
    holds.py, nats_holds.py  longest holds of the event loop, in CPU time
        hold_clients.py, hold_server.py
    hold_control.py          pauses of the machine, to compare with these holds
    module_bus.py            modules of one process against queues and channels
    memory_bus.py            MemoryBus in one event loop
    sdk.py                   rates of Python programs against nats-py
    single_messages.py       requests, confirms and one-way latency of such programs
    sdk_worker.py, sdk_peer.py, sdk_job.py    the programs, and their jobs
    spark.py                 Spark source and sink against Parquet files
    subscription_matching.py time and memory of subscription matching

    kills.py                 servers killed under load: are confirmed messages kept?
    engine_kills.py          the same for a JetStream cluster and stateless servers
    spark_kills.py           the same for Spark queries and the bus, with TLS and passwords
    partitions.py            bridges over a faulty network with killed ends
    soak.py                  random work for hours
    faulty_network.py        two network namespaces with delay, loss and cuts between them
    message_accounting.py    lost, repeated and out-of-order messages of such a run
    power_cut.py, disk/      power cuts of a directory; a preloaded library (C) with a slower disk
    small_server.py          a server with small segments and snapshots
    quick_reconnect.py       clients that reconnect at once
    broken_broker.py, broken_nats_server.py    faulty servers that the generator must detect

    lab/                     experiments that lost, still runnable
"""
