"""A bus between modules of one process, and gateways that are made of modules.

messages errors                     what modules say, and how calls end
mailbox switchboard waiting         what waits for whom: under one lock, and outside of it
workers bus plain                   who calls modules, and what programs call
plan module own_thread life gateway what a gateway is made of, and how its modules live
of_itself rates facts               how it is doing, for operators
modules/                            those that come with simplebus
"""

from __future__ import annotations

from simplebus.gateway.bus import ModuleBus, ModuleBusStatistics
from simplebus.gateway.config import EVERYONE, GatewayPlan, ModulePlan
from simplebus.gateway.errors import MalformedError, ModuleBusError, ModuleBusFullError, Result
from simplebus.gateway.gateway import Gateway, GatewayStatistics, open_gateway
from simplebus.gateway.mailbox import Full, ModuleStatistics
from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import AsyncPort, BlockingModule, BlockingPort, Module
from simplebus.gateway.supervisor import LifeStatistics, State

__all__ = [
    "EVERYONE",
    "AsyncPort",
    "BlockingModule",
    "BlockingPort",
    "Full",
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
