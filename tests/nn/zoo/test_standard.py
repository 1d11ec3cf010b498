"""Published weights: cached ones are adapted as they should be, and being offline is explained."""

import urllib.error

import pytest
import torch
import torchvision

from tessella.core.errors import UsageError
from tessella.nn import zoo
from tessella.nn.zoo import standard


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of torch, and no network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def offline(*args, **kwargs):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "urlopen", offline)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def publish(cache, name: str, state: dict[str, torch.Tensor]) -> None:
    url = torchvision.models.get_model_weights(name).DEFAULT.url
    torch.save(state, cache / url.rpartition("/")[2])


def test_published_weights_with_another_head_and_other_channels(cache):
    torch.manual_seed(1)
    published = torchvision.models.resnet18().state_dict()
    publish(cache, "resnet18", published)
    net = zoo.build(zoo.network("resnet18", classes=7, channels=1, size=32), pretrained=True)
    own = net.state_dict()
    assert own["fc.weight"].shape == (7, 512)
    torch.testing.assert_close(own["conv1.weight"][:, 0], published["conv1.weight"].sum(1))
    same = [k for k in own if not k.startswith(("fc.", "conv1."))]
    assert all(torch.equal(own[k], published[k]) for k in same)


@pytest.mark.parametrize(
    "name", ["fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"]
)
def test_published_weights_of_networks_for_pixels(cache, name):
    torch.manual_seed(1)
    make = torchvision.models.get_model
    reference = make(name, weights=None, weights_backbone=None, num_classes=21).eval()
    publish(cache, name, reference.state_dict())
    record = zoo.network(name, classes=21, size=48, answers="pixels")
    x = torch.randn(1, 3, 48, 48)
    assert torch.equal(zoo.build(record, pretrained=True).eval()(x), reference(x)["out"])
    record = zoo.network(name, classes=4, size=48, answers="pixels")
    own = zoo.build(record, pretrained=True).network.state_dict()
    kept = [k for k, v in reference.state_dict().items() if torch.equal(v, own[k])]
    assert {k.split(".")[0] for k in set(own) - set(kept)} == {"classifier"}
    assert len(set(own) - set(kept)) == 2 * len(standard.ARCHITECTURES[name].heads)


def test_a_head_of_the_same_classes_is_kept(cache):
    torch.manual_seed(1)
    reference = torchvision.models.resnet18().eval()
    publish(cache, "resnet18", reference.state_dict())
    net = zoo.build(zoo.network("resnet18", classes=1000, size=32), pretrained=True).eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(net(x), reference(x))


def test_more_channels_keep_the_response_to_a_grey_image():
    weight = torch.randn(4, 3, 5, 5)
    for channels in (1, 3, 6):
        spread = standard.spread_channels(weight, channels)
        assert spread.shape == (4, channels, 5, 5)
        torch.testing.assert_close(spread.sum(1), weight.sum(1))


def test_googlenet_takes_the_same_input_as_the_others(cache):
    """torchvision's pretrained one transforms its input; ours has the transform in its weights."""
    torch.manual_seed(1)
    reference = torchvision.models.GoogLeNet(transform_input=True, init_weights=True).eval()
    with torch.no_grad():  # statistics of a trained network, so that depth shrinks nothing
        for module in reference.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.weight.mul_(8)
        reference.conv1.bn.running_mean.normal_()
    publish(cache, "googlenet", reference.state_dict())
    net = zoo.build(zoo.network("googlenet", classes=1000), pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        ours = net.conv1.bn(net.conv1.conv(x))
        theirs = reference.conv1.bn(reference.conv1.conv(reference._transform_input(x)))
    inner = (..., slice(2, -2), slice(2, -2))  # the border sees padding, see fold_input_transform
    torch.testing.assert_close(ours[inner], theirs[inner], rtol=1e-4, atol=1e-4)
    assert not any("aux" in name for name in net.state_dict())
    assert torch.equal(net.fc.weight, reference.fc.weight)


@pytest.mark.parametrize("name", ["alexnet", "vgg16"])
def test_heads_are_found_in_the_classifier(name):
    architecture = standard.ARCHITECTURES[name]
    with torch.device("meta"):
        module = torchvision.models.get_model(name)
    (head,) = architecture.heads
    assert module.get_submodule(head).out_features == 1000
    assert module.get_submodule(architecture.first).in_channels == 3


def test_offline_is_explained(cache):
    network = zoo.network("resnet18", classes=7)
    with pytest.raises(UsageError, match=r"could not be fetched.*no route.*go online once.*hub"):
        zoo.build(network, pretrained=True)


def test_offline_timm_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    network = zoo.network("timm/resnet10t", classes=7, size=64)
    with pytest.raises(UsageError, match=r"timm/resnet10t could not be fetched.*go online"):
        zoo.build(network, pretrained=True)


def test_networks_without_published_weights():
    with pytest.raises(UsageError, match="nobody publishes weights"):
        zoo.build(zoo.network("lenet", classes=10), pretrained=True)
