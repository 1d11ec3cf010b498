"""deploy: hand plans to a Ray cluster, or replace those that it serves."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from tessella.artifacts.plan import load_outline
from tessella.cluster.front import ATTEMPTS, SETTINGS, Door
from tessella.cluster.replica import Deployment, Replica, described
from tessella.core.architectures import is_gpu
from tessella.core.errors import ServeError, UsageError, first_line
from tessella.core.record import to_plain
from tessella.server.limits import DEFAULT_LIMITS
from tessella.server.listening import GRACE_S
from tessella.server.traffic import Traffic

APPLICATION = "tessella"
CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
LOCAL_FIRST = "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"
SURGE_PERCENT = 25  # of the replicas, at least one: so many new ones start before old ones end
MOST_REPLICAS = 4096
READY_S = 600.0
WAITING = ("NOT_STARTED", "DEPLOYING", "UNHEALTHY")  # a replica that ends makes it unhealthy awhile


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many replicas there are, and what each has.

    Attributes:
        least, most: replicas; between them Ray goes by the requests at hand.
        cpus: cores of a replica, which its engines use.
        gpus: of a replica; None is one if a plan has programs for GPUs alone.

    Raises:
        UsageError: numbers that cannot be.
    """

    least: int = 1
    most: int = 1
    cpus: int = 1
    gpus: int | None = None

    def __post_init__(self) -> None:
        fits = 1 <= self.least <= self.most <= MOST_REPLICAS
        if not fits or self.cpus < 1 or (self.gpus is not None and self.gpus < 0):
            raise UsageError(
                "there cannot be so many replicas, or cores or GPUs of each",
                seen=self,
                fix=f"use 1 to {MOST_REPLICAS} replicas, each with a core or more",
            )

    @classmethod
    def parsed(cls, text: str, *, cpus: int = 1, gpus: int | None = None) -> Scale:
        """``4`` replicas, or from ``2:8`` as many as are needed.

        Raises:
            UsageError: it is neither.
        """
        if not re.fullmatch(r"[0-9]{1,4}(:[0-9]{1,4})?", text):
            raise UsageError("this is no number of replicas", seen=text[:40], fix="use 4, or 2:8")
        least, _, most = text.partition(":")
        return cls(least=int(least), most=int(most or least), cpus=cpus, gpus=gpus)


def deploy(
    models: Mapping[str, Path],
    *,
    door: Door,
    scale: Scale,
    traffic: Mapping[str, Traffic] | None = None,
    max_delay_us: int = 0,
    compiled: bool = True,
    decode: Literal["host", "gpu"] = "host",
    within_s: float = READY_S,
) -> str:
    """Let a Ray cluster serve these plans, in place of those that it serves, without a pause.

    The cluster runs already (``RAY_ADDRESS``, or on this machine); it serves on when this process
    has ended. The first time says where the proxies listen and who may come in; to change that,
    end it with ``serve shutdown``.

    Args:
        within_s: how long to wait for the replicas.

    Returns:
        The URL of the proxy on the cluster's head.

    Raises:
        UsageError: no Ray, no cluster, or an address, name or token that cannot be used.
        ArtifactError: a file that is no plan.
        ServeError: the replicas do not start.
    """
    door.guard()
    try:
        import ray  # takes 4 s
        from ray import serve
    except ImportError as error:
        raise UsageError("this needs Ray", fix="pip install 'tessella[ray]'") from error
    wanted = described(
        dict(models),
        door,
        traffic=dict(traffic or {}),
        max_delay_us=max_delay_us,
        compiled=compiled,
        decode=decode,
    )
    environment = {  # that proxies inherit from whoever starts Serve
        CALLBACK: "tessella.cluster.front.middlewares",
        SETTINGS: json.dumps(to_plain(door)),
        LOCAL_FIRST: "0",  # else other machines' replicas idle until the proxy's own are full
    }
    try:
        ray.init(
            address="auto",
            runtime_env={"env_vars": environment},
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    except ConnectionError as error:
        raise UsageError(
            "there is no Ray cluster here",
            seen=first_line(error),
            fix="ray start --head --disable-usage-stats; or set RAY_ADDRESS",
        ) from error
    try:
        serve.start(
            http_options={"host": door.host, "port": door.port},
            logging_config={"enable_access_log": False},
        )
        target = serve.RunTarget(_application(wanted, scale), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait(within_s)
        return _url(door)
    finally:
        ray.shutdown()


def _wait(within_s: float) -> None:
    """Wait until all replicas are those that were asked for.

    Raises:
        ServeError: they do not start, or not in this time.
    """
    from ray import serve

    until_s = time.monotonic() + within_s
    while True:
        application = serve.status().applications[APPLICATION]
        if application.status == "RUNNING":
            return
        if application.status not in WAITING or time.monotonic() > until_s:
            told = [application.message, *(d.message for d in application.deployments.values())]
            raise ServeError(
                "the replicas do not start",
                status=503,
                seen=f"{application.status.lower()}: {' '.join(filter(None, told))[-600:]}",
                fix="see serve status, and Ray's logs on their machines; or give the cluster more"
                " cores or GPUs",
            )
        time.sleep(0.5)


def _application(deployment: Deployment, scale: Scale) -> Any:
    import ray
    from ray import serve

    plans = [load_outline(file) for file in deployment.hashes]
    batch = max(min(spec.batch.max for spec in plan.manifest.inputs) for plan in plans)
    gpus = scale.gpus
    if gpus is None:
        gpus = int(any(all(map(is_gpu, plan.targets)) for plan in plans))
    replicas: dict[str, Any] = {"num_replicas": scale.least}
    if scale.most > scale.least:
        replicas = {
            "autoscaling_config": {
                "min_replicas": scale.least,
                "max_replicas": scale.most,
                "target_ongoing_requests": 2 * batch,  # one batch runs, one gathers
            }
        }
    # Without room for one more the update would wait for ever; then an old one ends first.
    free = ray.available_resources()
    room = free.get("CPU", 0) >= scale.cpus and free.get("GPU", 0) >= gpus
    return (
        serve.deployment(serve.ingress()(Replica))
        .options(
            name="replica",
            ray_actor_options={"num_cpus": scale.cpus, "num_gpus": gpus},
            # Ray's default of 5 would leave no batch to gather; the batcher refuses what is more.
            max_ongoing_requests=DEFAULT_LIMITS.waiting,
            max_queued_requests=DEFAULT_LIMITS.waiting,
            max_surge_percent=SURGE_PERCENT if room else 0,
            graceful_shutdown_timeout_s=GRACE_S,
            health_check_period_s=2.0,
            **replicas,
        )
        .bind(deployment)
    )


def _url(door: Door) -> str:
    """The address of Serve's proxies, after one of them has answered as a proxy of ours.

    Raises:
        UsageError: Serve ran before, with other proxies.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(door.host, door.host)
    url = f"http://[{host}]:{door.port}" if ":" in host else f"http://{host}:{door.port}"
    try:
        answer = httpx.get(f"{url}/v2/health/ready", timeout=10)
        ours = ATTEMPTS.decode() in answer.headers
        seen = f"{url} answers {answer.status_code}"
    except httpx.HTTPError as error:
        ours, seen = False, f"{url}: {error}"
    if not ours:
        raise UsageError(
            "the proxies of this cluster are not ours, or listen elsewhere",
            seen=seen,
            fix="serve shutdown, then deploy again; here must be one of the cluster's machines",
        )
    return url
