"""Networks built from Caffe text against the same networks written by hand in torch."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tessella.core.errors import UsageError
from tessella.nn import prototxt, zoo
from tests.support import prototxts as texts


def built(text: str, *, classes: int, shape: tuple[int, int, int]) -> prototxt.CaffeNet:
    torch.manual_seed(0)
    channels, height, width = shape
    net = prototxt.build(text, classes=classes, channels=channels, height=height, width=width)
    return net.double().eval()


def weights(net: prototxt.CaffeNet) -> dict[str, torch.Tensor]:
    return {k.removeprefix("layers."): v for k, v in net.state_dict().items()}


def test_lenet_equals_the_network_written_by_hand():
    net = built(texts.LENET, classes=7, shape=(1, 28, 28))
    w = weights(net)
    x = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    y = F.max_pool2d(F.conv2d(0.5 * x, w["conv1.weight"], w["conv1.bias"]), 2)
    y = F.max_pool2d(F.conv2d(y, w["conv2.weight"], w["conv2.bias"]), 2)
    y = F.relu(F.linear(y.flatten(1), w["ip1.weight"], w["ip1.bias"]))
    y = F.linear(y, w["ip2.weight"], w["ip2.bias"])
    torch.testing.assert_close(net(x), y)
    assert y.shape == (3, 7)
    assert sum(p.numel() for p in net.parameters()) == 431_080 - 3 * 501
    assert net.train()(x).shape == (3, 7)


def test_fillers_decide_the_first_weights():
    net = built(texts.LENET, classes=7, shape=(1, 28, 28))
    w = weights(net)
    assert (w["conv1.bias"] == 0.25).all()
    bound = (3 / 25) ** 0.5  # xavier over a fan-in of 1×5×5
    assert 0.9 * bound < w["conv1.weight"].abs().max() <= bound
    assert (w["conv2.bias"] == 0).all()
    again = built(texts.LENET, classes=7, shape=(1, 28, 28))
    assert all(torch.equal(w[k], v) for k, v in weights(again).items())


def lrn(x: torch.Tensor, size: int, alpha: float, beta: float) -> torch.Tensor:
    """From the formula, channel by channel."""
    y = torch.empty_like(x)
    for c in range(x.shape[1]):
        near = x[:, max(0, c - size // 2) : c + size // 2 + 1]
        y[:, c] = x[:, c] / (1 + alpha / size * near.square().sum(1)) ** beta
    return y


def test_alexnet_equals_the_network_written_by_hand():
    net = built(texts.ALEXNET, classes=9, shape=(3, 35, 35))
    w = weights(net)
    x = torch.randn(2, 3, 35, 35, dtype=torch.float64)
    y = F.relu(F.conv2d(x, w["conv1.weight"], w["conv1.bias"], stride=2))  # 16×16
    y = F.max_pool2d(F.pad(lrn(y, 5, 0.5, 0.75), (0, 1, 0, 1), value=-torch.inf), 3, 2)  # up to 8
    halves = [
        F.conv2d(half, weight, padding=1)
        for half, weight in zip(y.chunk(2, 1), w["conv2.weight"].chunk(2), strict=True)
    ]
    y = F.relu(torch.cat(halves, 1) + w["conv2.bias"].view(1, -1, 1, 1))
    ones = F.pad(torch.ones(1, 1, 8, 8, dtype=torch.float64), (0, 1, 0, 1))
    counts = F.avg_pool2d(ones, 3, 2)  # the last window holds only 2 of 3 rows and columns
    y = F.avg_pool2d(F.pad(y, (0, 1, 0, 1)), 3, 2) / counts
    y = F.relu(F.linear(y.flatten(1), w["fc6.weight"], w["fc6.bias"]))
    y = F.linear(y, w["fc7.weight"], w["fc7.bias"])
    torch.testing.assert_close(net(x), y)
    assert not torch.equal(net.train()(x), y)  # dropout


def test_inception_block_without_its_auxiliary_classifier():
    net = built(texts.INCEPTION, classes=4, shape=(4, 9, 9))
    w = weights(net)
    assert not any("loss1" in name for name in w)
    x = torch.randn(2, 4, 9, 9, dtype=torch.float64)
    ones = F.conv2d(x, w["inception_1x1.weight"], w["inception_1x1.bias"])
    threes = F.conv2d(x, w["inception_3x3_reduce.weight"], w["inception_3x3_reduce.bias"])
    threes = F.conv2d(threes, w["inception_3x3.weight"], w["inception_3x3.bias"], padding=1)
    y = torch.cat([ones, threes, F.max_pool2d(x, 3, 1, 1)], 1).mean((2, 3))
    y = F.linear(y, w["loss3_classifier.weight"], w["loss3_classifier.bias"])
    torch.testing.assert_close(net(x), y)
    torch.testing.assert_close(net.train()(x), y)


def residual_by_hand(x: torch.Tensor, w: dict[str, torch.Tensor], norm) -> torch.Tensor:
    def branch(name: str, padding: int) -> torch.Tensor:
        y = F.conv2d(x, w[f"res_{name}.weight"], stride=2, padding=padding)
        scale, bias = w[f"scale_{name}.weight"], w[f"scale_{name}.bias"]
        return norm(y, name) * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)

    y = F.relu(branch("branch1", 0) - 0.5 * branch("branch2", 1))
    return F.linear(y.mean((2, 3)), w["fc.weight"], w["fc.bias"])


def test_residual_block_in_training_and_inference():
    net = built(texts.RESIDUAL, classes=5, shape=(4, 8, 8))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(6, 4, 8, 8, dtype=torch.float64)

    def by_batch(y, name):
        mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, correction=0)
        return (y - mean) / (var + 1e-5).sqrt()

    torch.testing.assert_close(net.train()(x), residual_by_hand(x, weights(net), by_batch))

    def by_running(y, name):
        w = weights(net)
        mean, var = w[f"bn_{name}.running_mean"], w[f"bn_{name}.running_var"]
        return (y - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + 1e-5).sqrt()

    torch.testing.assert_close(net.eval()(x), residual_by_hand(x, weights(net), by_running))


def test_running_statistics_are_caffes_weighted_sums():
    net = built(texts.RESIDUAL, classes=5, shape=(4, 8, 8)).train()
    w = weights(net)["res_branch1.weight"]
    kept, mean_sum, weight_sum = 0.999, 0.0, 0.0
    for _ in range(4):
        x = torch.randn(6, 4, 8, 8, dtype=torch.float64) + 3
        net(x)
        mean_sum = kept * mean_sum + F.conv2d(x, w, stride=2).mean((0, 2, 3))
        weight_sum = kept * weight_sum + 1
    running = weights(net)["bn_branch1.running_mean"]
    torch.testing.assert_close(running, mean_sum / weight_sum)


def test_older_syntax_is_the_same_network():
    older = """
    input: "data" input_dim: 1 input_dim: 1 input_dim: 6 input_dim: 6
    layers { name: "conv" type: CONVOLUTION bottom: "data" top: "conv" blobs_lr: 1 blobs_lr: 2
             convolution_param < num_output: 2, kernel_size: 3; > }
    layers { name: "tanh" type: TANH bottom: "conv" top: "conv" }
    layers { name: "ip" type: INNER_PRODUCT bottom: "conv" top: "ip"
             inner_product_param { num_output: 3 } }
    layers { name: "loss" type: SOFTMAX_LOSS bottom: "ip" bottom: "label" }
    """
    net = built(older, classes=3, shape=(1, 6, 6))
    w = weights(net)
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    y = F.conv2d(x, w["conv.weight"], w["conv.bias"]).tanh().flatten(1)
    torch.testing.assert_close(net(x), F.linear(y, w["ip.weight"], w["ip.bias"]))
    assert [layer.type for layer in prototxt.layers(older)][-1] == "SoftmaxWithLoss"


def test_a_layer_of_the_training_phase_works_only_in_training():
    text = """
    layer { name: "double" type: "Power" bottom: "data" top: "data" power_param { scale: 2 }
            include { phase: TRAIN } }
    layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" }
    """
    net = built(text, classes=2, shape=(1, 2, 2))
    w = weights(net)
    x = torch.randn(3, 1, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(net(x), F.linear(x.flatten(1), w["ip.weight"], w["ip.bias"]))
    torch.testing.assert_close(
        net.train()(x), F.linear(2 * x.flatten(1), w["ip.weight"], w["ip.bias"])
    )


def test_a_convolution_can_be_the_classifier():
    text = """
    layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
            convolution_param { num_output: 1000 kernel_size: 1 } }
    layer { name: "pool" type: "Pooling" bottom: "conv" top: "pool"
            pooling_param { pool: AVE global_pooling: true } }
    layer { name: "prob" type: "Softmax" bottom: "pool" top: "prob" }
    """
    net = built(text, classes=4, shape=(3, 5, 5))
    w = weights(net)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    y = F.conv2d(x, w["conv.weight"], w["conv.bias"]).mean((2, 3))
    torch.testing.assert_close(net(x), y)


def test_it_can_be_exported():
    net = built(texts.INCEPTION, classes=4, shape=(4, 9, 9)).float()
    x = torch.randn(2, 4, 9, 9)
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), net(x))


def test_activations_are_freed_as_soon_as_nobody_reads_them():
    net = built(texts.RESIDUAL, classes=5, shape=(4, 8, 8))
    alive, most = {"image"}, 0
    for step in net.inference_plan.steps:
        assert set(step.inputs) <= alive
        alive |= set(step.outputs)
        most = max(most, len(alive))
        alive -= set(step.frees)
    assert alive == {net.inference_plan.logits}
    assert most == 3  # two branches, and what the next layer makes


def test_layers_for_a_drawing():
    layers = {layer.name: layer for layer in prototxt.layers(texts.LENET)}
    conv1, loss = layers["conv1"], layers["loss"]
    assert (conv1.type, conv1.bottoms, conv1.tops) == ("Convolution", ("scaled",), ("conv1",))
    assert conv1.parameters["num_output"] == "20"
    assert conv1.parameters["weight_filler"] == "xavier"
    assert conv1.phases == ("TRAIN", "TEST")
    assert loss.phases == ("TRAIN",)
    assert texts.LENET.splitlines()[conv1.line - 1].startswith('layer { name: "conv1"')


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (texts.ALEXNET, (3, 35, 35)),
        (texts.INCEPTION, (4, 9, 9)),
        (texts.RESIDUAL, (4, 8, 8)),
        ('layer{name:"d" type:"ImageData" top:"data" transform_param{crop_size:12}}', (3, 12, 12)),
        (texts.LENET, None),
    ],
)
def test_the_input_that_a_text_declares(text, shape):
    assert prototxt.input_shape(text) == shape


IP = 'layer { name: "ip" type: "InnerProduct" bottom: "%s" top: "ip" }'
CONV = (
    'layer { name: "c" type: "Convolution" bottom: "data" top: "c"\n'
    " convolution_param { num_output: 4 kernel_size: 3 %s } }\n" + IP % "c"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no layers"),
        ("\n\n" + IP % "nothing", r"layer 'ip' \(line 3\).*nothing"),
        ('layer { name: "x" type: "Magic" bottom: "data" top: "x" }', r"layer 'x'.*Seen: Magic"),
        (CONV % "\nwobble: 3", "layer 'c'.*wobble in line 3"),
        (CONV % "group: 2", r"layer 'c'.*group 2, 3 channels"),
        (CONV % "pad: -1", "pad at least 0"),
        (CONV % "kernel_h: 3", "kernel_h and kernel_w go together"),
        (CONV % "pad: true", "pad is not a whole number"),
        (CONV % 'weight_filler { type: "magic" }', "weight_filler is not supported.*magic"),
        (CONV.replace("num_output: 4", "") % "", r"layer 'c'.*num_output is missing"),
        (CONV.replace("kernel_size: 3", "kernel_size: 30") % "", r"layer 'c' \(line 1\).*input"),
        (CONV % "" + 'layer {name:"t" type:"TanH" bottom:"c" top:"t"}', "3 logits"),
        (
            'layer { name: "p" type: "Pooling" bottom: "data" top: "p"\n'
            "pooling_param { kernel_size: 9 } }\n" + IP % "p",
            r"layer 'p' \(line 1\): the pooling window is larger",
        ),
        (
            'layer { name: "p" type: "Pooling" bottom: "data" top: "p"\n'
            "pooling_param { pool: STOCHASTIC kernel_size: 2 } }\n" + IP % "p",
            r"layer 'p' \(line 2\): pool is not known.*STOCHASTIC",
        ),
        (
            'layer { name: "a" type: "ReLU" bottom: "data" top: "a" param { name: "w" } }\n'
            'layer { name: "b" type: "ReLU" bottom: "a" top: "b" param { name: "w" } }',
            "share their weights",
        ),
        (CONV % "" + 'layer {name: "s" type: "Softmax" top: "s"}', "layer 's'.*reads no blob"),
        (CONV % "" + 'layer {name: "s" type: "SoftmaxWithLoss"}', "layer 's'.*reads no blob"),
        ('layer {name: "r" type: "ReLU" bottom: "data"}', "no layer in phase"),
    ],
)
def test_errors_name_the_layer_and_the_line(text, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        prototxt.build(text, classes=3, channels=3, height=8, width=8)


@pytest.mark.parametrize(
    "names",
    [
        ("_modules", "_forward_hooks", "training", "keys", "call_super_init"),
        ("a_b", "a_b_4", "a/b"),
    ],
    ids=["torch's own", "those of others"],
)
def test_layers_with_names_that_are_taken_are_modules_of_their_own(names):
    last = "data"
    lines = ["input: 'data'"]
    for name in names:
        lines.append(
            f"layer {{ name: '{name}' type: 'InnerProduct' bottom: '{last}' top: '{name}'"
            " inner_product_param { num_output: 4 } }"
        )
        last = name
    net = built("\n".join(lines), classes=4, shape=(1, 2, 2))
    assert sum(p.numel() for p in net.parameters()) == 20 * len(names)
    x = y = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    for step in net.inference_plan.steps:
        w = weights(net)
        y = F.linear(y.flatten(1), w[f"{step.key}.weight"], w[f"{step.key}.bias"])
    torch.testing.assert_close(net(x), y)


@pytest.mark.parametrize(
    "layer",
    [
        'type: "DetectNetTransformation" bottom: "data" top: "seen" include { phase: TRAIN }',
        'type: "Python" bottom: "data" top: "list" python_param { module: '
        '"caffe.layers.detectnet.clustering" layer: "ClusterDetections" }',
    ],
)
def test_detectnet_is_refused_with_the_way_to_go(layer: str, tmp_path: Path) -> None:
    """As a network of boxes, which is what people ask of it, and as one of classes."""
    text = f'layer {{ name: "data" type: "Input" top: "data" }} layer {{ name: "x" {layer} }}'
    (tmp_path / "detectnet.prototxt").write_text(text)
    for answers in ("boxes", "picture"):
        with pytest.raises(UsageError, match=r"DetectNet.*train centernet"):
            zoo.network(str(tmp_path / "detectnet.prototxt"), classes=2, answers=answers)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="DetectNet"):
        built(text, classes=2, shape=(3, 8, 8))
    assert [one.name for one in prototxt.layers(text)] == ["data", "x"]  # it can be drawn
