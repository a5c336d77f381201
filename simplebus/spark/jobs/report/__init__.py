"""Report of rates, latencies, redeliveries and losses, from traces or archives.

Modules in reading order:

    traces    trace format, written by programs that publish and subscribe
    ranges    ranges of numbers with times; numpy only
    figures   figures of one subscriber, class and run; numpy only
    report    the Spark job: figures of traces and archives as a DataFrame
    summary   medians over rounds, and number formats
    panels    content of the chart
    chart     drawing of the chart as PNG; needs matplotlib
    page      tables and chart as an HTML page

It may import simplebus.spark.jobs. The load programs write traces in this format.
"""
