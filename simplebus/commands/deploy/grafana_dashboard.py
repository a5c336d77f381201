"""Dashboard of a simplebus server for Grafana, built from lists of its panels."""

from __future__ import annotations

from typing import Any, NamedTuple

_COLUMNS = 24
"""Width of Grafana's grid."""
_TILE_COLUMNS, _TILE_ROWS = 4, 4
_CHART_COLUMNS, _CHART_ROWS = 8, 8
_DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SELECTED = 'instance=~"$instance"'


class Panel(NamedTuple):
    """Panel of the dashboard."""

    title: str
    unit: str
    """Unit in Grafana's notation, such as `bytes`, `s` for seconds or `ops` for a rate."""
    queries: tuple[tuple[str, str], ...]
    """Expression with the placeholder SELECTED for the labels of the server, and legend."""


def _rate(metric: str, legend: str) -> tuple[str, str]:
    return f"sum(rate({metric}{{SELECTED}}[$__rate_interval]))", legend


def _rate_by(metric: str, label: str) -> tuple[str, str]:
    return f"sum by ({label}) (rate({metric}{{SELECTED}}[$__rate_interval]))", f"{{{{{label}}}}}"


def _sum_by(metric: str, label: str) -> tuple[str, str]:
    return f"sum by ({label}) ({metric}{{SELECTED}})", f"{{{{{label}}}}}"


def _share(part: str, whole: str) -> str:
    return f"sum({part}{{SELECTED}}) / sum({whole}{{SELECTED}})"


def _quantile(share: float, metric: str) -> tuple[str, str]:
    rates = f"rate({metric}_bucket{{SELECTED}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le) ({rates}))", f"p{share * 100:g}"


TILES = (
    Panel("Published", "ops", (_rate("simplebus_bus_published_messages_total", ""),)),
    Panel("Delivered", "ops", (_rate("simplebus_bus_delivered_messages_total", ""),)),
    Panel("Stored", "short", (("sum(simplebus_stored_messages{SELECTED})", ""),)),
    Panel("Dead letters", "short", (("sum(simplebus_dead_letters{SELECTED})", ""),)),
    Panel("Sessions", "short", (("sum(simplebus_sessions{SELECTED})", ""),)),
    Panel(
        "Memory",
        "percentunit",
        (
            (
                _share("simplebus_memory_bytes", "simplebus_memory_limit_bytes"),
                "",
            ),
        ),
    ),
)
CHARTS = (
    Panel("Published", "ops", (_rate_by("simplebus_published_messages_total", "class"),)),
    Panel("Delivered", "ops", (_rate_by("simplebus_delivered_messages_total", "class"),)),
    Panel("Acknowledged", "ops", (_rate_by("simplebus_acknowledged_messages_total", "class"),)),
    Panel("Lag", "short", (_sum_by("simplebus_lag_messages", "class"),)),
    Panel("In flight", "short", (_sum_by("simplebus_in_flight_messages", "class"),)),
    Panel("Redelivered", "ops", (_rate_by("simplebus_redelivered_messages_total", "class"),)),
    Panel("Dropped", "ops", (_rate_by("simplebus_bus_dropped_messages_total", "reason"),)),
    Panel("Blocked publishers", "short", (_sum_by("simplebus_blocked_publishers", "class"),)),
    Panel("Refused frames", "ops", (_rate_by("simplebus_refused_frames_total", "reason"),)),
    Panel(
        "Time until a message is confirmed",
        "s",
        tuple(_quantile(share, "simplebus_publish_confirm_seconds") for share in (0.5, 0.99)),
    ),
    Panel(
        "Time until a message is acknowledged",
        "s",
        tuple(_quantile(share, "simplebus_publish_ack_seconds") for share in (0.5, 0.99)),
    ),
    Panel(
        "Delay of the event loop",
        "s",
        tuple(_quantile(share, "simplebus_event_loop_delay_seconds") for share in (0.5, 0.99)),
    ),
    Panel("Memory of classes", "bytes", (_sum_by("simplebus_class_memory_bytes", "class"),)),
    Panel(
        "Memory and CPU of the process",
        "short",
        (
            ("sum(process_resident_memory_bytes{SELECTED})", "resident bytes"),
            _rate("process_cpu_seconds_total", "cores"),
        ),
    ),
    Panel("Connections", "short", (_sum_by("simplebus_connections", "listener"),)),
    Panel("Written to disk", "Bps", (_rate("simplebus_journal_written_bytes_total", "bytes"),)),
    Panel(
        "Time to write and sync",
        "s",
        tuple(_quantile(share, "simplebus_journal_write_seconds") for share in (0.5, 0.99)),
    ),
    Panel(
        "Free disk",
        "bytes",
        (("sum(simplebus_journal_disk_free_bytes{SELECTED})", "free"),),
    ),
    Panel(
        "NATS messages",
        "ops",
        (
            _rate("simplebus_nats_in_messages_total", "in"),
            _rate("simplebus_nats_out_messages_total", "out"),
        ),
    ),
    Panel("Lag of bridges", "short", (_sum_by("simplebus_bridge_lag_messages", "copier"),)),
    Panel("Disconnected", "ops", (_rate_by("simplebus_disconnected_total", "reason"),)),
)


def build_dashboard() -> dict[str, Any]:
    """Return the dashboard as the object that Grafana imports."""
    panels = list[dict[str, Any]]()
    for kind, listed, columns, rows, top in (
        ("stat", TILES, _TILE_COLUMNS, _TILE_ROWS, 0),
        ("timeseries", CHARTS, _CHART_COLUMNS, _CHART_ROWS, _TILE_ROWS),
    ):
        per_row = _COLUMNS // columns
        for number, panel in enumerate(listed):
            place = {
                "x": number % per_row * columns,
                "y": top + number // per_row * rows,
                "w": columns,
                "h": rows,
            }
            panels.append(_build_panel(len(panels) + 1, kind, panel, place))
    return {
        "uid": "simplebus",
        "title": "simplebus",
        "tags": ["simplebus"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": _DATA_SOURCE,
                    "query": "label_values(simplebus_info, instance)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                },
            ]
        },
        "panels": panels,
    }


def _build_panel(number: int, kind: str, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": kind,
        "title": panel.title,
        "datasource": _DATA_SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _DATA_SOURCE,
                "expr": expression.replace("SELECTED", _SELECTED),
                "legendFormat": legend,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }
