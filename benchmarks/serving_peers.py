"""Other servers of the same network: what the Python of ``benchmarks.serving --peers-venv`` runs.

``python serving_peers.py litserve|mlserver NETWORK.pt2 PORT SHAPE`` serves what torch.export saved,
compiled by torch, one image a request in the form that the server's documents show. Both join what
waits to batches of up to 32, in one process that computes.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from typing import Any

import numpy as np
import torch

try:
    import litserve
    import mlserver
    from mlserver.codecs import NumpyCodec
except ImportError as error:
    sys.exit(f"{error}: pip install litserve mlserver, into a virtual environment of their own")

MOST = 32
SHAPE = tuple(map(int, sys.argv[4].split("x")))  # of an image: "1x28x28"
WAIT_S = 0.001  # MLServer joins no requests without


class Network:
    """The network, compiled for batches of any size."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._module = torch.compile(torch.export.load(path).module(), dynamic=True)
        for count in (1, 2, 8, MOST):
            self(np.zeros((count, *SHAPE), np.float32))

    def __call__(self, images: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            scores: np.ndarray = self._module(torch.from_numpy(images)).numpy()
        return scores


class OnLitServe(litserve.LitAPI):  # type: ignore[misc]
    """Takes an image as base64 in JSON, and answers with a list of scores."""

    path = ""

    def setup(self, device: str) -> None:
        self.network = Network(self.path)

    def decode_request(self, request: dict[str, str]) -> np.ndarray:
        image = base64.b64decode(request["image"])
        return np.frombuffer(image, np.float32).reshape(SHAPE)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, images: np.ndarray) -> np.ndarray:
        return self.network(images)

    def unbatch(self, scores: np.ndarray) -> list[np.ndarray]:
        return list(scores)

    def encode_response(self, scores: np.ndarray) -> dict[str, list[float]]:
        return {"scores": scores.tolist()}


class OnMLServer(mlserver.MLModel):  # type: ignore[misc]
    """Takes and answers tensors in JSON, as the Open Inference Protocol has them."""

    async def load(self) -> bool:
        self.network = Network(self.settings.parameters.uri)
        return True

    async def predict(self, payload: Any) -> Any:
        scores = self.network(NumpyCodec.decode_input(payload.inputs[0]))
        outputs = [NumpyCodec.encode_output("scores", scores)]
        return mlserver.types.InferenceResponse(model_name=self.name, outputs=outputs)


def serve_litserve(path: str, port: int) -> None:
    api = OnLitServe(max_batch_size=MOST, batch_timeout=0.0)
    api.path = path
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")


def serve_mlserver(path: str, port: int) -> None:
    settings = mlserver.Settings(
        debug=False,
        parallel_workers=0,
        host="127.0.0.1",
        http_port=port,
        grpc_port=port + 1,
        metrics_endpoint=None,
    )
    model = mlserver.ModelSettings(
        name="network",
        implementation=OnMLServer,
        max_batch_size=MOST,
        max_batch_time=WAIT_S,
        parameters=mlserver.settings.ModelParameters(uri=path),
    )
    asyncio.run(mlserver.MLServer(settings).start([model]))


if __name__ == "__main__":
    kind, network, port, _ = sys.argv[1:]
    {"litserve": serve_litserve, "mlserver": serve_mlserver}[kind](network, int(port))
