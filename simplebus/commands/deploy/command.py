"""`simplebus deploy`: prints files that run and observe a server in containers, or an archive."""

from __future__ import annotations

import enum
import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from simplebus.console.errors import fail

HELP = (
    "Print a file that runs or observes a server: an image, a compose file, a manifest for "
    "Kubernetes, alert rules for Prometheus, or a dashboard for Grafana. The files pipeline-… run "
    "`simplebus pipeline archive` as a service of systemd, or in a container.\n\n"
    "With --directory the command writes the file, and every other file that it needs.\n\n\b\n"
    "  simplebus deploy alerts > simplebus-alerts.yml\n"
    "  simplebus deploy compose --directory .\n\n"
    "For a service of systemd see [bold]simplebus systemd-unit[/bold]."
)


class DeployedFile(enum.StrEnum):
    """File that the command prints."""

    CONTAINER = "container"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    PROMETHEUS = "prometheus"
    ALERTS = "alerts"
    GRAFANA = "grafana"
    PIPELINE_UNIT = "pipeline-unit"
    PIPELINE_CONTAINER = "pipeline-container"


_DASHBOARD = "simplebus-dashboard.json"
_NAMES = {
    DeployedFile.CONTAINER: ("Containerfile",),
    DeployedFile.COMPOSE: (
        *("compose.yaml", "Containerfile", "prometheus.yml", "simplebus-alerts.yml"),
        *("grafana-datasources.yml", "grafana-dashboards.yml", _DASHBOARD),
    ),
    DeployedFile.KUBERNETES: ("kubernetes.yaml",),
    DeployedFile.PROMETHEUS: ("prometheus.yml", "simplebus-alerts.yml"),
    DeployedFile.ALERTS: ("simplebus-alerts.yml",),
    DeployedFile.GRAFANA: (_DASHBOARD,),
    DeployedFile.PIPELINE_UNIT: ("simplebus-pipeline.service",),
    DeployedFile.PIPELINE_CONTAINER: ("Containerfile.pipeline",),
}
"""Names of each file and of the files that it needs."""


def deploy(
    file: Annotated[
        DeployedFile, typer.Argument(show_default=False, help="Name of the file to print.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the file, and those that it needs, to this directory. Existing files are "
            "not replaced.",
        ),
    ] = None,
) -> None:
    names = _NAMES[file]
    if directory is None:
        typer.echo(render_file(names[0]), nl=False)
        return
    if existing := [name for name in names if (directory / name).exists()]:
        fail(
            f"{directory} already contains {', '.join(existing)}; remove them or select another DIR"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            (directory / name).write_text(render_file(name), "utf-8")
    except OSError as error:
        fail(f"cannot write to {directory}: {error.strerror}")
    typer.echo(f"wrote {', '.join(names)} to {directory}")


def render_file(name: str) -> str:
    """Return the content of a file of the command."""
    if name == _DASHBOARD:
        from simplebus.commands.deploy.grafana_dashboard import build_dashboard

        return json.dumps(build_dashboard(), indent=2) + "\n"
    folder = resources.files("simplebus.commands.deploy").joinpath("files")
    return folder.joinpath(name).read_text("utf-8")
