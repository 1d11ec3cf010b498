"""Load on a server, and what it answers: needs neither an engine nor torch."""

from tessella.loadtest.bodies import Target, body_for
from tessella.loadtest.generator import Outcome, generate
from tessella.loadtest.schedule import closed, poisson, trace

__all__ = ["Outcome", "Target", "body_for", "closed", "generate", "poisson", "trace"]
