"""Triton as a peer of ``benchmarks.serving``, with what ``pip install nvidia-pytriton`` brings.

``python serving_triton.py onnxruntime|openvino NETWORK.onnx PORT SHAPE`` becomes its server, with
batches of up to 32. The wheel has the server and its backend for Python alone, so that this file is
the model in its repository, too: ONNX Runtime and OpenVINO run in it as they would in backends of
their own, but for one more copy of the inputs and outputs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ != "__main__":  # the backend does not look at PYTHONPATH
    sys.path.insert(0, os.environ["PACKAGES"])

import numpy as np  # with another than the wheel's, version 2, outputs come out empty

MOST = 32
CLASSES = {1: 10, 3: 1000}  # of the networks that are served, by the channels of their images

Run = Callable[[np.ndarray], np.ndarray]


def onnxruntime(network: str, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {session.get_inputs()[0].name: images})[0]


def openvino(network: str, threads: int) -> Run:
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(network, "CPU", settings)
    return lambda images: compiled([images])[0]


class TritonPythonModel:
    """What the backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        told = json.loads(args["model_config"])["parameters"]
        make = {"onnxruntime": onnxruntime, "openvino": openvino}[told["engine"]["string_value"]]
        self._run = make(told["network"]["string_value"], int(os.environ["OMP_NUM_THREADS"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer the requests that Triton joined to a batch."""
        import triton_python_backend_utils as triton

        inputs = [triton.get_input_tensor_by_name(one, "image").as_numpy() for one in requests]
        scores = self._run(inputs[0] if len(inputs) == 1 else np.concatenate(inputs))
        answers, begin = [], 0
        for images in inputs:
            end = begin + len(images)
            answers.append(triton.InferenceResponse([triton.Tensor("scores", scores[begin:end])]))
            begin = end
        return answers


def repository(folder: Path, engine: str, network: str, shape: list[int]) -> Path:
    """The models' repository with the network in it."""
    home = folder / "models" / "network"
    (home / "1").mkdir(parents=True)
    shutil.copy(__file__, home / "1" / "model.py")
    told = {"engine": engine, "network": network}
    parameters = ", ".join(
        f'{{key: "{key}" value: {{string_value: "{value}"}}}}' for key, value in told.items()
    )
    classes = CLASSES[shape[0]]
    (home / "config.pbtxt").write_text(
        f"""
        backend: "python" max_batch_size: {MOST} dynamic_batching {{}}
        input [{{name: "image" data_type: TYPE_FP32 dims: {shape}}}]
        output [{{name: "scores" data_type: TYPE_FP32 dims: [{classes}]}}]
        instance_group [{{kind: KIND_CPU count: 1}}]
        parameters [{parameters}]
        """
    )
    return home.parent


def main() -> None:
    engine, network, port, shape = sys.argv[1:]
    try:
        import pytriton
    except ImportError as error:
        sys.exit(f"{error}: pip install nvidia-pytriton {engine}, into the peers' environment")
    wheel = Path(pytriton.__file__).parent
    triton, libraries = wheel / "tritonserver", wheel.parent / "nvidia_pytriton.libs"
    folder = Path(tempfile.mkdtemp())
    backend = shutil.copytree(triton / "backends" / "python", folder / "backends" / "python")
    stub = "triton_python_backend_stub"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(triton / "python_backend_stubs" / version / stub, backend / stub)
    models = repository(folder, engine, network, [int(size) for size in shape.split("x")])
    path = [str(libraries), sysconfig.get_config_var("LIBDIR")]
    ports = {"http": int(port), "grpc": int(port) + 1, "metrics": int(port) + 2}
    os.execve(
        triton / "bin" / "tritonserver",
        [
            "tritonserver",
            f"--model-repository={models}",
            f"--backend-directory={backend.parent}",
            "--log-info=false",
            *(f"--{name}-port={number}" for name, number in ports.items()),
        ],
        os.environ
        | {"LD_LIBRARY_PATH": os.pathsep.join(path), "PACKAGES": sysconfig.get_path("purelib")},
    )


if __name__ == "__main__":
    main()
