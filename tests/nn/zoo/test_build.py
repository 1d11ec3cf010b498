"""Every standard network builds for unusual inputs, with the parameter counts of its reference."""

import subprocess
import sys

import pytest
import torch
import torchvision

from tessella.core.errors import UsageError
from tessella.nn import zoo

DENSE = ("unet", "fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large")
STANDARD = ("lenet", "alexnet", "googlenet", "vgg16", "resnet18", "resnet50", "resnet152")


def on_meta(network) -> torch.nn.Module:
    """Shapes without memory: the large networks cost nothing."""
    with torch.device("meta"):
        return zoo.build(network)


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_names():
    assert zoo.names() == STANDARD


@pytest.mark.parametrize("name", STANDARD)
def test_a_record_is_filled_with_the_usual_input(name):
    network, known = zoo.network(name, classes=10), zoo.describe(name)
    assert (network.channels, network.height, network.width) == (
        known.channels, known.size, known.size,
    )  # fmt: skip
    assert network.source is None
    assert known.title
    assert 1990 < known.year < 2020


@pytest.mark.parametrize("name", STANDARD[1:])
def test_parameter_counts_are_torchvisions(name):
    # The counts that torchvision publishes with its weights, for 1,000 classes.
    published = torchvision.models.get_model_weights(name).DEFAULT.meta["num_params"]
    assert count(on_meta(zoo.network(name, classes=1000))) == published


def test_lenet_has_caffes_parameter_count():
    assert count(on_meta(zoo.network("lenet", classes=10))) == 431_080


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.parametrize(("channels", "size", "classes"), [(1, (70, 95), 2), (5, 101, 37)])
def test_any_size_channels_and_classes(name, channels, size, classes):
    network = zoo.network(name, classes=classes, channels=channels, size=size)
    x = torch.empty(2, channels, network.height, network.width, device="meta")
    assert on_meta(network)(x).shape == (2, classes)


@pytest.mark.parametrize("name", STANDARD)
def test_the_smallest_size_works_and_one_less_is_refused(name):
    smallest = zoo.describe(name).smallest_size
    network = zoo.network(name, classes=3, size=smallest)
    x = torch.empty(2, network.channels, smallest, smallest, device="meta")
    assert on_meta(network).eval()(x).shape == (2, 3)
    with pytest.raises(UsageError, match=f"too small|at least {smallest}"):
        zoo.network(name, classes=3, size=(smallest - 1, 224))


@pytest.mark.parametrize("size", range(8, 30))
def test_lenet_learns_from_tiny_inputs(size):
    net = zoo.build(zoo.network("lenet", classes=3, size=(size, 37 - size)))
    y = net(torch.randn(2, 1, size, 37 - size))
    y.sum().backward()
    assert y.shape == (2, 3)
    assert all(p.grad.abs().sum() > 0 for p in net.parameters())


@pytest.mark.parametrize("name", ["lenet", "resnet18", "googlenet", "timm/resnet10t"])
def test_the_seed_decides_the_weights(name):
    network = zoo.network(name, classes=4, channels=2, size=32)
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(zoo.build(network).state_dict())
    assert all(torch.equal(v, states[1][k]) for k, v in states[0].items())
    assert any(not torch.equal(v, states[2][k]) for k, v in states[0].items())


@pytest.mark.parametrize("name", ["googlenet", "resnet18"])
def test_a_first_convolution_of_other_channels_starts_like_the_original(name):
    """The same spread (fan-out rules do not depend on the input channels), not torch's default."""
    torch.manual_seed(0)
    rgb, many = (
        next(zoo.build(zoo.network(name, classes=2, channels=c)).parameters()) for c in (3, 9)
    )
    assert many.shape == (64, 9, *rgb.shape[2:])
    assert abs(many.std() / rgb.std() - 1) < 0.1


def test_options_reach_the_network():
    net = on_meta(zoo.network("alexnet", classes=2, options={"dropout": 0.125}))
    assert {m.p for m in net.modules() if isinstance(m, torch.nn.Dropout)} == {0.125}
    with pytest.raises(UsageError, match=r"AlexNet does not take.*Seen: droput.*it takes dropout"):
        zoo.network("alexnet", classes=2, options={"droput": 0.1})


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("lenett", "use lenet"),
        ("resnet-50", "use resnet50"),
        ("resnet34", "use timm/resnet34"),
        ("timm/resnt18", "use timm/resnet18"),
        ("timm/hf-hub:someone/else", "timm.list_models"),
        ("qqqq", r"use one of lenet, .*timm/NAME, file.py:Class or net.prototxt"),
    ],
)
def test_unknown_names_get_near_matches(name, fix):
    with pytest.raises(UsageError, match=fix):
        zoo.network(name, classes=2)


def test_numbers_that_cannot_be():
    for wrong in ({"classes": 0}, {"classes": 2, "channels": 0}, {"classes": 2, "size": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            zoo.network("resnet18", **wrong)


def test_only_standard_networks_have_a_description():
    with pytest.raises(UsageError, match="use one of lenet"):
        zoo.describe("timm/resnet18")


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("timm/resnet10t", 2, (40, 56)),
        ("timm/vit_tiny_patch16_224", 1, (32, 48)),
        ("timm/mobilenetv3_small_050", 3, (64, 64)),
    ],
)
def test_timm_names(name, channels, size):
    net = zoo.build(zoo.network(name, classes=5, channels=channels, size=size))
    assert net.training
    assert net(torch.randn(2, channels, *size)).shape == (2, 5)


def test_timm_gives_the_usual_input():
    network = zoo.network("timm/vit_base_patch16_384", classes=2)
    assert (network.channels, network.height, network.width) == (3, 384, 384)


def test_timm_refuses_what_would_read_files_and_says_what_does_not_fit():
    def build(size=224, **options):
        zoo.build(zoo.network("timm/vit_tiny_patch16_224", classes=2, size=size, options=options))

    with pytest.raises(UsageError, match=r"Seen: checkpoint_path"):
        build(checkpoint_path="weights.pth")
    with pytest.raises(UsageError, match="Seen: pretrained_cfg"):
        build(pretrained_cfg="x")
    with pytest.raises(UsageError, match=r"(cannot build|cannot take).*8"):
        build(size=8)
    with pytest.raises(UsageError, match="nonsense"):
        build(nonsense=1)


def test_a_prototxt_is_read_into_the_record(tmp_path):
    text = 'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" }'
    path = tmp_path / "net.prototxt"
    path.write_text(text)
    network = zoo.network(str(path), classes=3, channels=2, size=4)
    path.unlink()  # the record is whole
    assert network.source == text
    assert zoo.build(network)(torch.zeros(5, 2, 4, 4)).shape == (5, 3)
    with pytest.raises(UsageError, match="cannot be read"):
        zoo.network(str(path), classes=3)


ALONE = """
import sys
from tessella.nn import zoo
zoo.build(zoo.network("lenet", classes=10))
print(*{"timm", "torchvision"} & set(sys.modules))
"""


def test_a_lenet_needs_neither_torchvision_nor_timm():
    """They take as long to import as torch: a job that trains digits starts without them."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", DENSE)
def test_networks_for_pixels_keep_the_size(name):
    smallest = zoo.describe(name).smallest_size
    for channels, height, width in ((3, smallest, smallest), (1, smallest + 5, smallest + 14)):
        record = zoo.network(
            name, classes=4, channels=channels, size=(height, width), answers="pixels"
        )
        module = zoo.build(record).eval()
        assert module(torch.zeros(2, channels, height, width)).shape == (2, 4, height, width)
    with pytest.raises(UsageError, match="asks for the picture"):
        zoo.network(name, classes=4)
    with pytest.raises(UsageError, match="too small"):
        zoo.network(name, classes=4, size=smallest - 1, answers="pixels")


def test_a_network_of_one_s_own_for_pixels(tmp_path):
    text = """
from torch import nn

class Pixels(nn.Conv2d):
    def __init__(self, classes, channels):
        super().__init__(channels, classes, 3, padding=1)
"""
    (tmp_path / "own.py").write_text(text)
    name = f"{tmp_path / 'own.py'}:Pixels"
    record = zoo.network(name, classes=4, channels=1, size=(6, 8), answers="pixels")
    assert zoo.build(record)(torch.zeros(1, 1, 6, 8)).shape == (1, 4, 6, 8)
    with pytest.raises(UsageError, match=r"logits of shape \[N, 4\]"):
        zoo.build(zoo.network(name, classes=4, channels=1, size=(6, 8)))
