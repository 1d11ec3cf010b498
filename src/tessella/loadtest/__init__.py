"""Load on a server, and what it answers: needs neither an engine nor torch."""

from tessella.loadtest.bodies import Target, body_for
from tessella.loadtest.generator import Outcome, generate
from tessella.loadtest.schedule import closed, poisson, trace
from tessella.loadtest.servers import running, started
from tessella.loadtest.sizing import Asked, Found, Served, Setting, Trial, search

__all__ = [
    "Asked", "Found", "Outcome", "Served", "Setting", "Target", "Trial", "body_for", "closed",
    "generate", "poisson", "running", "search", "started", "trace",
]  # fmt: skip
