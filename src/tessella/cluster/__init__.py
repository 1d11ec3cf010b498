"""Plans on several machines, on Ray Serve (``pip install 'tessella[ray]'``).

Ray starts processes, counts them up and down, and finds one that is free; what a request means and
what a plan is remain ours:

    client ─HTTP─▶ proxy of a machine: AskingAgain ─Ray─▶ Replica: App, Repository, engines

``deploy`` hands a ``Deployment`` to a Ray cluster that runs: the files of the plans with their
hashes, the rules of traffic, and the ``Door``, which says where the proxies listen and who may come
in. Files are named and not sent, so they lie at the same path on every machine; a ``Replica`` that
finds another plan than was deployed does not start, so replicas never differ.

A ``Replica`` is the server of one process that ``tessella serve`` starts, without its socket. It
puts its name on every answer. An answer without a name was made by Ray, whose replica died:
``AskingAgain``, around each proxy, has kept the request and asks another, since inferring twice
changes nothing. The header ``tessella-attempts`` tells the client how often it was asked.

What would change one replica of many (load, unload, traffic, shared memory) is refused: deploy
again, and Ray replaces the replicas one after another while they serve.
"""

from tessella.cluster.deploying import Scale, deploy

__all__ = ["Scale", "deploy"]
