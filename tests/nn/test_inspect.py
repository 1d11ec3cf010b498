"""Layer views and summaries against values computed by hand and published counts."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from tessella.artifacts.files import from_document
from tessella.core.errors import UsageError
from tessella.nn import inspect, zoo
from tessella.nn.picture import picture


class Net(nn.Module):
    """A layer used twice, one that works in place, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(4)
        self.unused = nn.Linear(1, 1)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5))

    def forward(self, x):
        return self.relu(self.head(self.norm(self.relu(self.conv(x)))))


def test_statistics_are_numpys():
    values = torch.randn(5000) * 3 + 1
    found, array = inspect.statistics(values), values.double().numpy()
    expected = (array.min(), array.max(), array.mean(), array.std())
    np.testing.assert_allclose((found.min, found.max, found.mean, found.std), expected, rtol=1e-5)
    counts = np.histogram(values.numpy(), 20)[0]
    assert sum(found.histogram) == 5000
    assert np.abs(np.array(found.histogram) - counts).max() <= 1  # a value on an edge
    assert found.not_finite == 0


def test_statistics_of_odd_tensors():
    found = inspect.statistics(torch.tensor([1.0, torch.nan, 3.0, torch.inf]))
    assert (found.min, found.max, found.mean, found.std) == (1.0, 3.0, 2.0, 1.0)
    assert found.not_finite == 2
    constant = inspect.statistics(torch.full((7,), 2.0, dtype=torch.bfloat16))
    assert (constant.std, constant.histogram[0], sum(constant.histogram)) == (0.0, 7, 7)
    nothing = inspect.statistics(torch.tensor([torch.nan]))
    assert (nothing.not_finite, sum(nothing.histogram)) == (1, 0)
    assert inspect.statistics(torch.tensor([0, 4])).mean == 2.0


def test_layers_come_in_order_with_what_they_made():
    net, x = Net().train(), torch.randn(2, 3, 8, 8)
    net.norm.eval()  # frozen by the user
    views = inspect.layers(net, x)
    assert [(v.name, v.call, v.type) for v in views] == [
        ("conv", 1, "Conv2d"),
        ("relu", 1, "ReLU"),
        ("norm", 1, "BatchNorm2d"),
        ("head.0", 1, "Flatten"),
        ("head.1", 1, "Linear"),
        ("relu", 2, "ReLU"),
    ]
    made = net.conv(x)
    assert views[0].activation == inspect.statistics(made)  # before ReLU changed it in place
    assert views[0].activation.min < 0
    assert views[1].activation == inspect.statistics(made.clamp(min=0))
    assert views[0].output_shape == (2, 4, 6, 6)
    assert views[0].parameters == 4 * 27 + 4
    assert views[0].weights["bias"] == inspect.statistics(net.conv.bias)
    assert set(views[0].weights) == {"weight", "bias"}
    assert views[3].weights == {}
    assert (net.training, net.norm.training) == (True, False)
    assert all(not m._forward_hooks for m in net.modules())
    assert net.norm.num_batches_tracked == 0


def test_views_are_written_for_the_studio(tmp_path):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 3, 8, 8)
    report = inspect.write_views(net, x, tmp_path / "views")
    content = (tmp_path / "views" / "layers.json").read_bytes()
    read = from_document(
        content, inspect.LayerReport, kind="layers", version=inspect.VERSION, where="layers.json"
    )
    assert read == report
    assert read.parameters == sum(p.numel() for p in net.parameters())
    assert read.input_shape == (2, 3, 8, 8)
    files = {f for v in read.layers for f in (v.activation_picture, v.weight_picture) if f}
    assert files == {p.name for p in (tmp_path / "views").glob("*.png")}
    assert len(files) == 6 + 3  # an activation each; weights of conv, norm and linear
    with Image.open(tmp_path / "views" / read.layers[0].activation_picture) as image:
        shown = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(shown, picture(net.conv(x)[0]))
    assert read.layers[3].weight_picture is None
    again = inspect.write_views(net, x[:1], tmp_path / "views")  # replaces the folder
    assert again.input_shape == (1, 3, 8, 8)


def test_one_layer_is_drawn_as_with_all_others(tmp_path):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(1, 3, 8, 8)
    report = inspect.write_views(net, x, tmp_path / "all")
    known, ran = inspect.KnownViews(), []
    last = [m for m in net.modules() if not list(m.children())][-1]
    last.register_forward_hook(lambda *_: ran.append(1))
    for index in (0, 4, 0):
        look = inspect.write_view(net, x, tmp_path / "one", index, known=known)
        assert look.layer == report.layers[index]
        for name in (look.layer.activation_picture, look.layer.weight_picture):
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()
    lines = [(v.name, v.type, v.output_shape, v.parameters) for v in report.layers]
    assert [(v.name, v.type, v.output_shape, v.parameters) for v in look.layers] == lines
    assert look.parameters == report.parameters
    assert len(list((tmp_path / "one").iterdir())) == 4
    assert len(ran) == 2  # the first time, and for the last layer: else it ends at the layer
    assert inspect.write_view(net, x, tmp_path / "one", 99, known=known).layer is None


def test_a_network_whose_layers_follow_the_picture_is_listed_anew(tmp_path):
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x):
            return self.one(x) if x.sum() > 0 else self.other(self.one(x))

    net, known = Chooses(), inspect.KnownViews()
    for x, names in ((torch.ones(1, 2), ["one"]), (-torch.ones(1, 2), ["one", "other"])):
        look = inspect.write_view(net, x, tmp_path, 1, known=known)
        assert [line.name for line in look.layers] == names


def test_views_of_a_whole_network(tmp_path):
    net = zoo.build(zoo.network("lenet", classes=10))
    report = inspect.write_views(net, torch.rand(1, 1, 28, 28), tmp_path / "views")
    assert [v.name for v in report.layers] == [
        "conv1", "pool1", "conv2", "pool2", "flatten", "fc1", "relu", "fc2",
    ]  # fmt: skip
    assert sum(p.stat().st_size for p in (tmp_path / "views").iterdir()) < 1_000_000


@pytest.mark.parametrize("name", ["alexnet", "googlenet", "vgg16", "resnet18", "resnet50"])
def test_summary_has_the_published_counts(name):
    published = torchvision.models.get_model_weights(name).DEFAULT.meta
    with torch.device("meta"):
        net = zoo.build(zoo.network(name, classes=1000))
    found = inspect.summary(net, (3, 224, 224))
    assert found.parameters == published["num_params"]
    assert sum(row.parameters for row in found.rows) == published["num_params"]
    assert found.macs / 1e9 == pytest.approx(published["_ops"], abs=6e-4)  # published in billions
    assert sum(row.macs for row in found.rows) == found.macs


def test_summary_row_by_row():
    found = inspect.summary(Net(), (3, 8, 8))
    rows = {(row.name, i): row for i, row in enumerate(found.rows)}
    conv, linear = rows["conv", 0], rows["head.1", 4]
    assert (conv.output_shape, conv.macs) == ((1, 4, 6, 6), 36 * 4 * 27)
    assert (linear.output_shape, linear.parameters, linear.macs) == ((1, 5), 725, 720)
    assert found.macs == 36 * 4 * 27 + 720
    assert found.parameters == sum(p.numel() for p in Net().parameters())


def test_summary_counts_what_lies_between_layers():
    net = zoo.build(zoo.network("timm/vit_tiny_patch16_224", classes=2, size=32))
    found = inspect.summary(net, (3, 32, 32))
    assert found.parameters > sum(row.parameters for row in found.rows)  # position embedding
    assert found.macs > sum(row.macs for row in found.rows)  # attention's products


def test_an_input_that_does_not_fit():
    with pytest.raises(UsageError, match=r"cannot take this input.*\[1, 3, 9, 9\]"):
        inspect.summary(Net(), (3, 9, 9))
