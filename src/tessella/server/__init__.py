"""Open Inference Protocol over HTTP on a repository of plans."""

from tessella.server.limits import Limits
from tessella.server.repository import Repository
from tessella.server.serve import Server, serve

__all__ = ["Limits", "Repository", "Server", "serve"]
