"""From a folder of images to an answer over HTTP, in the order in which the data flows.

    python examples/folder_to_http.py flowers/

The folder has one subfolder of images a class. Everything is written beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

import tessella as ts
from tessella.server import Server


def main(folder: Path) -> dict[str, str]:
    work = folder.with_name(f"{folder.name}-tessella")
    dataset = ts.data.images(folder, size=32, crop=28, holdout=0.2, out=work / "dataset")
    run = ts.train(
        "lenet",
        dataset,
        out=work / "run",
        epochs=5,
        batch_size=16,
        solver={"name": "adamw", "lr": 1e-3},
    )
    plan = ts.compile(run, batch=(1, 4, 8))
    print(plan)
    report = ts.verify(plan, against=run, data=dataset)
    print(f"checkpoint {report.checkpoint_score:.3f}, plan {report.plan_score:.3f}")
    path = plan.save(work / f"{folder.name}.plan")

    answers = {}
    with Server({folder.name: path}) as server:
        for image in sorted(folder.glob("*/*"))[:: max(1, len(list(folder.glob("*/*"))) // 4)]:
            answer = httpx.post(
                f"{server.url}/v2/models/{folder.name}/classify?top=1",
                content=image.read_bytes(),
                headers={"Content-Type": "application/octet-stream"},
            ).raise_for_status()
            top = answer.json()["predictions"][0][0]
            answers[str(image.relative_to(folder))] = top["label"]
            print(f"{image}: {top['label']} ({top['score']:.3f})")
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
