"""Descriptions of the server and its models, in the words of Triton's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessella.core.dtype import dtype
from tessella.core.spec import TensorSpec
from tessella.core.version import VERSION
from tessella.device.nvjpeg import has_own_decoders
from tessella.server.instance_process import Instances
from tessella.server.repository import Model
from tessella.server.waiting import DEFAULT_PRIORITY, PRIORITIES

PLATFORM = "tessella_plan"
EXTENSIONS = (
    "binary_tensor_data", "classification", "model_configuration", "model_repository",
    "model_repository(unload_dependents)", "statistics", "system_shared_memory",
)  # fmt: skip


def server_metadata() -> dict[str, Any]:
    return {"name": "tessella", "version": VERSION, "extensions": list(EXTENSIONS)}


def model_metadata(model: Model, versions: Sequence[Model]) -> dict[str, Any]:
    """The protocol's metadata of a version; ``versions`` are those of its name that are ready."""
    return {
        "name": model.name,
        "versions": [other.version for other in versions],
        "platform": PLATFORM,
        "inputs": [_tensor(s) for s in model.signature.inputs.values()],
        "outputs": [_tensor(s) for s in model.signature.outputs.values()],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": dtype(spec.dtype).wire, "shape": _shape(spec)}


def _shape(spec: TensorSpec) -> list[int]:
    """Sizes, −1 where they may vary."""
    return [d if isinstance(d, int) else -1 for d in spec.shape]


def model_config(model: Model, versions: Sequence[Model]) -> dict[str, Any]:
    """The configuration in Triton's fields; facts without a field are in ``parameters``."""
    manifest = model.engine.manifest
    facts = {
        "plan_hash": model.plan_hash,
        "target": manifest.fingerprint.target,
        "precision": manifest.precision,
        "built_from": manifest.built_from,
        "preprocess_hash": manifest.preprocess_hash or "",
        "image_input": model.signature.image_input or "",
        "jpeg_decoder": jpeg_decoder(model),
        "task": manifest.task.name,
        "verb": model.signature.answers.VERB,
        "version": model.version,
    }
    served = [int(other.version) for other in versions]
    on_gpu = manifest.fingerprint.target.startswith("sm_")
    instances = len(model.statistics.instances) or 1
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": "tessella",
        "version_policy": {"specific": {"versions": served}},
        "max_batch_size": model.max_batch,
        "input": [_config_tensor(s) for s in model.signature.inputs.values()],
        "output": [_config_tensor(s) for s in model.signature.outputs.values()],
        "instance_group": [
            {
                "name": model.name,
                "kind": "KIND_GPU" if on_gpu else "KIND_CPU",
                "count": instances,
            }
        ],
        "dynamic_batching": {
            "max_queue_delay_microseconds": model.max_delay_us,
            "priority_levels": len(PRIORITIES),
            "default_priority_level": DEFAULT_PRIORITY,
        },
        "parameters": {name: {"string_value": value} for name, value in facts.items()},
    }


def jpeg_decoder(model: Model) -> str:
    """Who makes a model's pixels of JPEG files: the ``host``, to whose bits the ``gpu`` with
    decoders of its own makes them, too; ``gpu_kernels`` are up to 8 of 255 apart. Nobody: "".
    """
    if model.signature.image_input is None:
        return ""
    if not model.decodes:
        return "host"
    assert not isinstance(model.engine, Instances), "of which the GPU decodes for none"
    return "gpu" if has_own_decoders(model.engine.device) else "gpu_kernels"


def _config_tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "data_type": f"TYPE_{dtype(spec.dtype).wire}",
        "dims": _shape(spec)[1:],  # the batch is in max_batch_size
    }
