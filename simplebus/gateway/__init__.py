"""Module bus between the parts of one process, and gateways that are made of modules.

messages, errors       messages with their byte form, and the errors of the module bus
blocking               waiting without deadlocks
mailbox, routing       the queue of each module, and the routes between modules
workers                a thread or task per module
bus                    the module bus
result_codes           the module bus as calls that return result codes
config                 gateway plans, read from TOML
module                 the classes Module and BlockingModule, and their ports
health                 requests the health of a module without blocking
supervisor             starts, restarts and stops one module
gateway                modules by name, with their links
rate_meter, metrics    statistics for operators
modules/               modules that come with simplebus

May import config, bridge (for the uplink), memory, monitor, client, logs and core.
"""

from __future__ import annotations

from simplebus.gateway.bus import ModuleBus, ModuleBusStatistics
from simplebus.gateway.config import EVERYONE, GatewayPlan, ModulePlan
from simplebus.gateway.errors import MalformedError, ModuleBusError, ModuleBusFullError, Result
from simplebus.gateway.gateway import Gateway, GatewayStatistics, open_gateway
from simplebus.gateway.mailbox import FullQueuePolicy, ModuleStatistics
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, BlockingModule, BlockingPort, Module
from simplebus.gateway.supervisor import LifeStatistics, State

Full = FullQueuePolicy
"""Former name of FullQueuePolicy."""

__all__ = [
    "EVERYONE",
    "AsyncPort",
    "BlockingModule",
    "BlockingPort",
    "Full",
    "FullQueuePolicy",
    "Gateway",
    "GatewayPlan",
    "GatewayStatistics",
    "LifeStatistics",
    "MalformedError",
    "Module",
    "ModuleBus",
    "ModuleBusError",
    "ModuleBusFullError",
    "ModuleBusStatistics",
    "ModuleMessage",
    "ModulePlan",
    "ModuleStatistics",
    "Result",
    "State",
    "open_gateway",
]
