"""Which files a dataset keeps as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from tessella.core.preprocess import decode, fitted
from tessella.data import images, parts, reading, storing
from tessella.data.importing import ImportSettings, import_images

SMALL = ImportSettings(size=8, holdout=0.0, workers=1)


@pytest.mark.parametrize("few", [1, 64], ids=["by processes", "by threads"])
def test_original_files_are_stored_as_they_are(
    few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that cost little to decode, by default those of a fitting size; all others are PNG, and
    damaged ones are left out."""
    monkeypatch.setattr(reading, "FEW", few)
    monkeypatch.setattr(parts, "MEASURED", 6)
    source = tmp_path / "s"
    rng = np.random.default_rng(0)
    kinds: dict[str, dict[str, object]] = {
        "small": {"size": (8, 8)},
        "larger": {"size": (20, 13)},
        "grey": {"size": (9, 9), "mode": "L"},
        "huge": {"size": (30, 30)},
        "cmyk": {"size": (9, 9), "mode": "CMYK"},
        "turned": {"size": (9, 12), "exif": Image.Exif()},
        "progressive": {"size": (9, 9), "progressive": True},
    }
    kinds["turned"]["exif"][274] = 6  # type: ignore[index]
    for name in "ab":
        (source / name).mkdir(parents=True)
        for kind, made in kinds.items():
            width, height = made["size"]  # type: ignore[misc]
            pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
            image = Image.fromarray(pixels).convert(str(made.get("mode", "RGB")))
            saved = {k: v for k, v in made.items() if k in ("exif", "progressive")}
            image.save(source / name / f"{kind}.jpg", **saved)
    (source / "a" / "cut.jpg").write_bytes((source / "a" / "larger.jpg").read_bytes()[:-40])
    settings = replace(SMALL, store="original")
    dataset = import_images(source, tmp_path / "original", settings)
    plain = import_images(source, tmp_path / "png", replace(settings, store="png"))
    assert [f.path for f in dataset.info.skipped] == ["a/cut.jpg"] == [
        f.path for f in plain.info.skipped
    ]  # fmt: skip
    assert len(dataset.train) == len(plain.train) == 14
    for ours, theirs in zip(dataset.train, plain.train, strict=True):
        kept = Path(ours.path).stem in ("small", "larger", "grey", "progressive")
        assert (ours.content == (source / ours.path).read_bytes()) == kept
        assert kept or ours.content == theirs.content
        assert np.array_equal(
            fitted(ours.content, dataset.preprocess), decode(theirs.content, plain.preprocess)
        )
    usual = import_images(source, tmp_path / "usual", replace(settings, store="auto"))
    assert usual.preprocess == plain.preprocess
    for ours, theirs in zip(usual.train, plain.train, strict=True):
        assert (ours.content == theirs.content) == (Path(ours.path).stem not in ("small", "grey"))
        assert ours.content in (theirs.content, (source / ours.path).read_bytes())
    monkeypatch.setattr(storing, "DECODE_ONCE_BYTES", 0)
    decoders: list[bool | Exception] = [RuntimeError("CUDA error: out of memory"), True]
    monkeypatch.setattr(storing, "_gpu_decodes", Mock(side_effect=decoders))
    full = import_images(source, tmp_path / "full", replace(settings, store="auto"))
    assert full.info.content_hash == usual.info.content_hash
    beside_a_gpu = import_images(source, tmp_path / "gpu", replace(settings, store="auto"))
    for ours, original in zip(beside_a_gpu.train, dataset.train, strict=True):
        assert (ours.content == original.content) == (Path(ours.path).stem != "progressive")
    same = images(source, out=beside_a_gpu.path, size=8, holdout=0.0)  # no GPU is asked again
    assert same.info == beside_a_gpu.info
    for other in (dataset, beside_a_gpu):
        assert np.allclose(other.preprocess.mean, plain.preprocess.mean, atol=0.1)
        assert (other.preprocess.mean == plain.preprocess.mean) == (few == 64)
