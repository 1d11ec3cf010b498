"""Open Inference Protocol over HTTP and gRPC on a repository of plans."""

from tessella.server.doors import Doors
from tessella.server.instances import Placement, parse_instances
from tessella.server.limits import Limits
from tessella.server.repository import Repository
from tessella.server.serve import Server, serve
from tessella.server.traffic import Traffic, parse_rule

__all__ = [
    "Doors", "Limits", "Placement", "Repository", "Server", "Traffic", "parse_instances",
    "parse_rule", "serve",
]  # fmt: skip
