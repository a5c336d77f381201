"""Metrics and monitoring page of a gateway."""

from __future__ import annotations

from simplebus.gateway.gateway import Gateway
from simplebus.gateway.supervisor import LifeStatistics, State
from simplebus.monitor.metrics_builder import MetricsBuilder
from simplebus.monitor.snapshot import Column, Health, MonitorSnapshot, Note, Table, Tile


def gateway_health(gateway: Gateway) -> Health:
    """Return the health of a gateway: ready if no module has failed."""
    problem = gateway.problem()
    return Health(ready=not problem, draining=gateway.is_draining, reason=problem)


def gateway_snapshot(gateway: Gateway, *, subtitle: str = "") -> MonitorSnapshot:
    """Return the monitoring snapshot of a gateway."""
    statistics = gateway.statistics()
    metrics_builder = MetricsBuilder()
    for module in statistics.modules:
        _count(metrics_builder, module)
    metrics_builder.counter(
        "gateway_published_messages", "Messages that were published.", statistics.published
    )
    metrics_builder.counter(
        "gateway_malformed_messages", "Malformed byte forms.", statistics.malformed
    )
    metrics_builder.counter(
        "gateway_lost_messages", "Not delivered: the module was removed.", statistics.lost
    )
    failed = [module for module in statistics.modules if module.state is State.FAILED]
    return MonitorSnapshot(
        title="simplebus gateway",
        subtitle=subtitle,
        health=gateway_health(gateway),
        metrics=metrics_builder.build(),
        flows={
            "said": statistics.published,
            "heard": sum(module.delivered for module in statistics.modules),
            "dropped": sum(module.dropped for module in statistics.modules) + statistics.lost,
        },
        tiles=[
            Tile("Modules", len(statistics.modules)),
            Tile("Failed", len(failed)),
            Tile("Waiting", sum(module.waiting for module in statistics.modules)),
        ],
        tables=[_modules(statistics.modules), _links(statistics.links)],
        notes=[Note(f"module {module.name!r}", _failure(module), is_bad=True) for module in failed],
    )


def _failure(module: LifeStatistics) -> str:
    return f"failed and restarting: {module.error}"


def _count(metrics_builder: MetricsBuilder, module: LifeStatistics) -> None:
    name = module.name
    metrics_builder.gauge(
        "gateway_module_running",
        "1 if the module is running.",
        module.state is State.RUNNING,
        module=name,
    )
    metrics_builder.gauge(
        "gateway_module_waiting", "Messages in its queue.", module.waiting, module=name
    )
    for metric, help, value in (
        ("gateway_module_failures", "Failures of the module.", module.failures),
        ("gateway_module_delivered", "Messages that the module received.", module.delivered),
        ("gateway_module_dropped", "Dropped: its queue was full.", module.dropped),
        ("gateway_module_published", "Messages that the module published.", module.published),
    ):
        metrics_builder.counter(metric, help, value, module=name)
    for value_name, health_value in module.own.items():
        if isinstance(health_value, int | float):
            metrics_builder.gauge(
                "gateway_module_value",
                "Value from the module's health.",
                health_value,
                module=name,
                what=value_name,
            )


def _modules(modules: tuple[LifeStatistics, ...]) -> Table:
    return Table(
        "modules",
        "Modules",
        [
            Column("Module"),
            Column("Kind"),
            Column("State"),
            Column("Published", "count", "Messages that the module published.", is_flow=True),
            Column("Received", "count", "Messages that the module received.", is_flow=True),
            Column("Waiting", "count", "Messages in its queue."),
            Column("Dropped", "count", "Dropped: its queue was full."),
            Column("Failures", "count", "Failures of the module."),
            Column("Last error"),
            Column("Health", hint="Values from the module's health."),
        ],
        [
            [
                module.name,
                module.module,
                module.state.value,
                module.published,
                module.delivered,
                module.waiting,
                module.dropped,
                module.failures,
                module.error,
                " ".join(f"{name}={value}" for name, value in module.own.items()),
            ]
            for module in modules
        ],
    )


def _links(links: tuple[tuple[str, str], ...]) -> Table:
    return Table(
        "links", "Links", [Column("From"), Column("To")], [[source, sink] for source, sink in links]
    )
