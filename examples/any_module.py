"""Any torch module, or an ONNX file, as a plan: no dataset, no checkpoint.

python examples/any_module.py
"""

from __future__ import annotations

import torch
import torchvision

import tessella as ts
from tessella.core.spec import TensorSpec


def main() -> float:
    module = torchvision.models.mobilenet_v3_small(num_classes=10).eval()
    image = TensorSpec(name="image", dtype="float32", shape=(1, 3, 96, 96))
    plan = ts.compile(module, inputs=[image], batch=(1, 2, 4))
    print(plan)
    engine = ts.load(plan)
    images = torch.randn(3, 3, 96, 96)  # any batch: buckets are padded, split and joined
    with torch.inference_mode():
        difference = (engine(images)["output"] - module(images)).abs().max()
    print(f"largest difference from eager: {difference:.2e}")
    return float(difference)


if __name__ == "__main__":
    main()
