"""Routes of the administration over HTTP, and their OpenAPI description."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from simplebus.monitor.requests import JSON
from simplebus.server.http.api_types import ApiParameters, ApiResult, ErrorBody

PREFIX = "/api/v1/"
Operation = TypeVar("Operation", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One request of the API."""

    path: str
    operation: str
    """Name of the method that answers it, and `operationId`."""
    summary: str
    permission: str
    parameters: type[ApiParameters]
    result: type[ApiResult]
    changes: bool
    """True for POST with a body, False for GET with a query."""
    needs_user: bool
    needs_all_rights: bool
    """True if a user with a permissions table is refused."""

    @property
    def method(self) -> str:
        return "POST" if self.changes else "GET"


class ApiRoutes:
    """Routes by path. Methods declare themselves with `add`."""

    def __init__(self) -> None:
        self.by_path: dict[str, ApiRoute] = {}

    def add(
        self,
        path: str,
        permission: str,
        *,
        changes: bool = True,
        needs_user: bool = True,
        needs_all_rights: bool = False,
    ) -> Callable[[Operation], Operation]:
        """Return a decorator that adds a method to the routes.

        The docstring of the method is the summary. Its annotations are the schemas of the
        parameters and of the result.
        """

        def declare(method: Operation) -> Operation:
            hints = typing.get_type_hints(method)
            self.by_path[PREFIX + path] = ApiRoute(
                path=path,
                operation=method.__name__,
                summary=method.__doc__ or "",
                permission=permission,
                parameters=hints["parameters"],
                result=hints["return"],
                changes=changes,
                needs_user=needs_user,
                needs_all_rights=needs_all_rights,
            )
            return method

        return declare

    def describe(self, version: str) -> dict[str, Any]:
        """Return the OpenAPI 3.1 description."""
        routes = self.by_path.values()
        _, components = msgspec.json.schema_components(
            [
                *dict.fromkeys(route.result for route in routes),
                ErrorBody,
                *dict.fromkeys(route.parameters for route in routes),
            ],
            ref_template="#/components/schemas/{name}",
        )
        return {
            "openapi": "3.1.0",
            "info": {"title": "simplebus", "version": version or "0"},
            "paths": {
                path: {route.method.lower(): _describe_route(route, components)}
                for path, route in self.by_path.items()
            },
            "security": [{"basic": []}, {"bearer": []}],
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "basic": {"type": "http", "scheme": "basic"},
                    "bearer": {"type": "http", "scheme": "bearer"},
                },
            },
        }


def _describe_route(route: ApiRoute, components: Mapping[str, Any]) -> dict[str, Any]:
    schema = components[route.parameters.__name__]
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "description": f"Permission: {route.permission}.",
        "responses": {
            "200": _describe_content("Result.", route.result),
            "default": _describe_content("Error.", ErrorBody),
        },
    }
    if not route.changes:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": name in schema["required"], "schema": each}
            for name, each in schema["properties"].items()
        ]
        return operation
    guard = {"name": "X-Simplebus-Request", "in": "header", "required": True}
    operation["parameters"] = [{**guard, "schema": {"type": "string", "minLength": 1}}]
    operation["requestBody"] = {"required": True, **_content_of(route.parameters)}
    return operation


def _describe_content(description: str, struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {"description": description, **_content_of(struct)}


def _content_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{struct.__name__}"}
    return {"content": {JSON: {"schema": reference}}}
