"""What a gateway tells of itself to operators."""

from __future__ import annotations

from simplebus.gateway.gateway import Gateway
from simplebus.gateway.supervisor import LifeStatistics, State
from simplebus.monitor.counted import Counted
from simplebus.monitor.facts import Column, Facts, Health, Note, Table, Tile


def health_of(gateway: Gateway) -> Health:
    """Whether all modules do their work, at this moment."""
    why = gateway.problem()
    return Health(ready=not why, draining=gateway.is_draining, why=why)


def facts_of(gateway: Gateway, *, subtitle: str = "") -> MonitorSnapshot:
    """A snapshot: not ready while a module has failed."""
    found = gateway.statistics()
    metrics_builder = MetricsBuilder()
    for module in found.modules:
        _count(metrics_builder, module)
    metrics_builder.counter("gateway_published_messages", "Messages that were taken.", found.published)
    metrics_builder.counter("gateway_malformed_messages", "Byte forms that were none.", found.malformed)
    metrics_builder.counter("gateway_lost_messages", "Not given: a module was removed.", found.lost)
    failed = [each for each in found.modules if each.state is State.FAILED]
    return MonitorSnapshot(
        title="simplebus gateway",
        subtitle=subtitle,
        health=health_of(gateway),
        metrics=metrics_builder.metrics(),
        flows={
            "said": found.published,
            "heard": sum(each.delivered for each in found.modules),
            "dropped": sum(each.dropped for each in found.modules) + found.lost,
        },
        tiles=[
            Tile("Modules", len(found.modules)),
            Tile("Failed", len(failed)),
            Tile("Waiting", sum(each.waiting for each in found.modules)),
        ],
        tables=[_modules(found.modules), _links(found.links)],
        notes=[Note(f"module {each.name!r}", _failure(each), is_bad=True) for each in failed],
    )


def _failure(module: LifeStatistics) -> str:
    return f"it has failed and is made again: {module.error}"


def _count(metrics_builder: MetricsBuilder, module: LifeStatistics) -> None:
    name = module.name
    metrics_builder.gauge(
        "gateway_module_running",
        "Whether a module runs.",
        module.state is State.RUNNING,
        module=name,
    )
    metrics_builder.gauge("gateway_module_waiting", "Messages in its queue.", module.waiting, module=name)
    for metric, help, value in (
        ("gateway_module_failures", "How often something of it raised.", module.failures),
        ("gateway_module_delivered", "Messages that it was given.", module.delivered),
        ("gateway_module_dropped", "Not heard: its queue was full.", module.dropped),
        ("gateway_module_published", "Messages that it has said.", module.published),
    ):
        metrics_builder.counter(metric, help, value, module=name)
    for what, own in module.own.items():
        if isinstance(own, int | float):
            metrics_builder.gauge(
                "gateway_module_value", "What it says of itself.", own, module=name, what=what
            )


def _modules(modules: tuple[LifeStatistics, ...]) -> Table:
    return Table(
        "modules",
        "Modules",
        [
            Column("Module"),
            Column("Kind"),
            Column("State"),
            Column("Said", "count", "Messages that it has published.", is_flow=True),
            Column("Heard", "count", "Messages that it was given.", is_flow=True),
            Column("Waiting", "count", "Messages in its queue."),
            Column("Dropped", "count", "Messages that it did not hear: its queue was full."),
            Column("Failures", "count", "How often something of it raised."),
            Column("Last error"),
            Column("Of itself", hint="What the module says of itself."),
        ],
        [
            [
                each.name,
                each.module,
                each.state.value,
                each.published,
                each.delivered,
                each.waiting,
                each.dropped,
                each.failures,
                each.error,
                " ".join(f"{name}={value}" for name, value in each.own.items()),
            ]
            for each in modules
        ],
    )


def _links(links: tuple[tuple[str, str], ...]) -> Table:
    return Table(
        "links", "Links", [Column("From"), Column("To")], [[source, sink] for source, sink in links]
    )
