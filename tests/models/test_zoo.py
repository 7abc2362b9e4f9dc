"""The networks against the published parameter counts and against NumPy implementations of their layers."""

import json
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal
from torch.func import functional_call, grad, stack_module_state, vmap

from holdfast.core.errors import HoldfastError
from holdfast.models.registry import MODELS, ModelSpec, cnn, linear, mlp, parse_model, resnet18, resnet50

CIFAR, MNIST, DIGITS = (3, 32, 32), (1, 28, 28), (3, 28, 28)

# name, shape, classes, trainable parameters, width of the features
COUNTS = [
    ("ntd-cifar", CIFAR, 10, 2_156_490, 512),
    ("ntd-cifar", CIFAR, 100, 2_202_660, 512),
    ("ntd-mnist", MNIST, 10, 1_663_370, 512),
    ("ntd-mnist", MNIST, 62, 1_690_046, 512),
    ("t-cnn", CIFAR, 10, 878_538, 512),
    ("resnet50", CIFAR, 100, 23_712_932, 2048),
    ("resnet50", (3, 64, 64), 200, 23_917_832, 2048),
    ("resnet50", (3, 224, 224), 1000, 25_557_032, 2048),
    ("resnet18", (3, 224, 224), 1000, 11_689_512, 512),
    ("mobilenetv2", (3, 224, 224), 1000, 3_504_872, 1280),
    ("vit", CIFAR, 10, 2_693_578, 192),
    ("fa-fmnist", MNIST, 10, 299_306, 192),
    ("fa-cifar10", CIFAR, 10, 797_962, 192),
    ("fa-cifar100", CIFAR, 100, 11_588_516, 256),
    ("fa-digits", DIGITS, 10, 14_213_578, 512),
    ("fa-validation-fmnist", MNIST, 10, 262_966, 100),
    ("fa-validation-digits", DIGITS, 10, 540_438, 100),
    ("mlp-resnet18", CIFAR, 10, 11_181_642, 512),
    ("mlp-resnet18", CIFAR, 100, 11_227_812, 512),
    ("mlp-cnn5", MNIST, 10, 235_522, 64),
    ("mlp-cnn5", MNIST, 62, 238_902, 64),
    ("moon-cnn", CIFAR, 10, 92_626, 256),
]
TOKENS = ("char-lstm", "char-transformer")  # models that take sequences of tokens
GENERAL = ("resnet18", "resnet50", "mobilenetv2", "vit")
PAPER_SHAPES = {name: shape for name, shape, *_ in COUNTS if name not in GENERAL}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def images(shape, batch=2, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(batch, *shape)).astype(np.float32))


def weights(model):
    return {name: value.detach().double().numpy() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("name", "shape", "classes", "parameters", "features"), COUNTS)
def test_parameter_counts_and_feature_width_are_the_published_ones(
    name, shape, classes, parameters, features
):
    model = MODELS[name]().build(shape, classes, seed=0)
    *_, last = model.modules()
    assert count(model) == parameters
    assert isinstance(last, torch.nn.Linear)
    assert (last.in_features, last.out_features) == (features, classes)


def test_every_model_has_its_count_asserted_or_follows_from_arithmetic():
    assert set(MODELS) == {name for name, *_ in COUNTS} | {"linear", "mlp", "cnn", *TOKENS}
    assert count(linear().build((4, 3), 5, seed=0)) == 12 * 5 + 5
    assert count(mlp(7, 6).build((4, 3), 5, seed=0)) == (12 * 7 + 7) + (7 * 6 + 6) + (6 * 5 + 5)
    assert count(mlp().build(MNIST, 10, seed=0)) == 199_210  # the "2NN" of McMahan et al.
    lstm = 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 257 * 80
    assert count(MODELS["char-lstm"]().build((80,), 80, seed=0)) == lstm
    block = 2 * 2 * 128 + 128 * 384 + 384 + 129 * 128 + 129 * 512 + 513 * 128
    transformer = (65 + 80) * 128 + 2 * block + 2 * 128 + 129 * 65
    assert count(MODELS["char-transformer"]().build((80,), 65, seed=0)) == transformer
    published = MODELS["vit"](patch=16, depth=12).build((3, 224, 224), 1000, seed=0)
    assert count(published) == 5_717_416  # DeiT's tiny one


@pytest.mark.parametrize("name", sorted(PAPER_SHAPES))
def test_papers_networks_give_logits(name):
    model = MODELS[name]().build(PAPER_SHAPES[name], 10, seed=0)
    out = model(images(PAPER_SHAPES[name], batch=3))
    assert out.shape == (3, 10)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (CIFAR, 2_156_490),
        (MNIST, 1_663_370),
        ((1, 8, 8), (9 * 16 + 16) + (16 * 9 * 32 + 32) + (2 * 2 * 32 * 64 + 64) + (64 * 10 + 10)),
        ((1, 4, 4), None),
        ((1, 16, 16), None),
        (
            (3, 64, 64),
            (75 * 32 + 32) + 25 * 64 * (32 + 64) + 2 * 64 + (64 * 64 * 512 + 512) + (512 * 10 + 10),
        ),
        ((3, 17, 250), None),
        ((3, 224, 224), None),
    ],
)
def test_the_default_cnn_adapts_to_the_image(shape, parameters):
    model = cnn().build(shape, 10, seed=0)
    assert model(images(shape)).shape == (2, 10)
    assert parameters is None or count(model) == parameters
    assert count(model) < 4_000_000  # a large image does not make a large model


def test_the_default_cnn_is_fedntds_network_on_cifar():
    ours, theirs = (MODELS[name]().build(CIFAR, 10, seed=3).state_dict() for name in ("cnn", "ntd-cifar"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


# The layers in NumPy (float64), written from the published tables.


def conv(x, weight, bias, padding=0):
    kernel = weight.shape[-1]
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), axis=(2, 3))
    out = np.tensordot(windows, weight, axes=([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)
    return out + bias[:, None, None]


def relu(x):
    return np.maximum(x, 0)


def pool(x):
    batch, channels, height, width = x.shape
    return x.reshape(batch, channels, height // 2, 2, width // 2, 2).max(axis=(3, 5))


def numpy_forward(name, params, x):
    """Logits from the parameters in order: convolutions first, then fully connected layers."""
    tensors = iter(params.values())

    def next_conv(x, padding=0):
        return relu(conv(x, next(tensors), next(tensors), padding))

    def next_fc(x):
        return x @ next(tensors).T + next(tensors)

    def flat(x):
        return x.reshape(len(x), -1)

    if name == "ntd-cifar":
        x = flat(pool(next_conv(pool(next_conv(x, 2)), 2)))
        return next_fc(relu(next_fc(x)))
    if name == "fa-digits":
        x = flat(next_conv(pool(next_conv(pool(next_conv(x, 2)), 2)), 2))
        return next_fc(relu(next_fc(relu(next_fc(x)))))
    if name == "mlp-cnn5":
        x = flat(pool(next_conv(pool(next_conv(x)))))
        return next_fc(relu(next_fc(relu(next_fc(x)))))
    assert name == "moon-cnn"
    x = flat(pool(next_conv(pool(next_conv(x)))))
    x = relu(next_fc(relu(next_fc(x))))
    return next_fc(next_fc(relu(next_fc(x))))  # projection head: its output has no ReLU


@pytest.mark.parametrize("name", ["ntd-cifar", "fa-digits", "mlp-cnn5", "moon-cnn"])
def test_convolutional_networks_compute_their_published_layers(name):
    model = MODELS[name]().build(PAPER_SHAPES[name], 10, seed=1).double()
    x = images(PAPER_SHAPES[name]).double()
    np.testing.assert_allclose(
        model(x).detach().numpy(), numpy_forward(name, weights(model), x.numpy()), rtol=1e-9, atol=1e-12
    )


def group_norm(x, weight, bias):
    groups = x.reshape(len(x), 2, -1)
    normal = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    return normal.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]


def test_a_resnet_with_group_norm_computes_its_layers():
    model = resnet18(norm="group", stem="3x3").build((1, 8, 8), 3, seed=1).double()
    with torch.no_grad():
        for parameter in model.parameters():  # norm weights of one and biases of zero would hide mistakes
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    x = images((1, 8, 8)).double()
    tensors = iter(weights(model).values())

    def next_conv_norm(x, stride=1):
        weight = next(tensors)
        out = conv(x, weight, np.zeros(len(weight)), padding=weight.shape[-1] // 2)[:, :, ::stride, ::stride]
        return group_norm(out, next(tensors), next(tensors))

    y = relu(next_conv_norm(x.numpy()))
    for stage in range(4):
        for block in range(2):
            changes = stage > 0 and block == 0
            stride = 2 if changes else 1
            branch = next_conv_norm(relu(next_conv_norm(y, stride)))
            y = relu(branch + (next_conv_norm(y, stride) if changes else y))
    logits = y.mean(axis=(2, 3)) @ next(tensors).T + next(tensors)
    np.testing.assert_allclose(model(x).detach().numpy(), logits, rtol=1e-8)
    assert next(tensors, None) is None


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_the_lstm_computes_its_published_equations():
    model = MODELS["char-lstm"](embedding=3, width=4).build((6,), 5, seed=1).double()
    x = np.random.default_rng(0).integers(0, 5, (2, 6))
    w = weights(model)
    sequence = w["embedding.weight"][x]
    for layer in range(2):
        inputs, recurrent = w[f"lstm.weight_ih_l{layer}"], w[f"lstm.weight_hh_l{layer}"]
        bias = w[f"lstm.bias_ih_l{layer}"] + w[f"lstm.bias_hh_l{layer}"]
        hidden, cell, outputs = np.zeros((2, 4)), np.zeros((2, 4)), []
        for position in range(6):
            gates = sequence[:, position] @ inputs.T + hidden @ recurrent.T + bias
            admit, forget, new, emit = np.split(gates, 4, axis=1)
            cell = sigmoid(forget) * cell + sigmoid(admit) * np.tanh(new)
            hidden = sigmoid(emit) * np.tanh(cell)
            outputs.append(hidden)
        sequence = np.stack(outputs, 1)
    logits = sequence @ w["classifier.weight"].T + w["classifier.bias"]
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), logits, rtol=1e-9)


def layer_norm(x, weight, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


def test_the_transformer_computes_its_published_equations():
    model = MODELS["char-transformer"](width=6, heads=2, layers=2).build((5,), 4, seed=1).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    x = np.random.default_rng(0).integers(0, 4, (2, 5))
    w = weights(model)

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    y = w["embedding.weight"][x] + w["positions.weight"]
    for block in ("blocks.0", "blocks.1"):
        heads = []
        qkv = dense(norm(y, f"{block}.attention_norm"), f"{block}.attention")
        for head in range(2):
            query, key, value = (qkv[..., 6 * part + 3 * head :][..., :3] for part in range(3))
            scores = query @ key.transpose(0, 2, 1) / np.sqrt(3)
            scores[:, ~np.tri(5, dtype=bool)] = -np.inf
            shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            heads.append(shares @ value)
        y = y + dense(np.concatenate(heads, -1), f"{block}.output")
        wide = dense(norm(y, f"{block}.forward_norm"), f"{block}.widen")
        y = y + dense(wide * normal.cdf(wide), f"{block}.narrow")
    logits = dense(norm(y, "norm"), "classifier")
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), logits, rtol=1e-9)


@pytest.mark.parametrize("name", TOKENS)
def test_a_prediction_does_not_depend_on_later_tokens(name):
    model = MODELS[name]().build((9,), 7, seed=0)
    x = torch.randint(0, 7, (2, 9), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 5:] = (x[:, 5:] + 1) % 7
    before, after = model(x), model(changed)
    assert before.shape == (2, 9, 7)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5] - after[:, 5]).abs().max() > 1e-4
    with pytest.raises(HoldfastError, match=rf"'{name}' takes sequences of tokens, .* shape \[3, 32, 32\]"):
        MODELS[name]().build(CIFAR, 10, seed=0)


def test_heads_divide_the_width():
    with pytest.raises(HoldfastError, match="width is 10; it must be a multiple of heads, 4"):
        MODELS["char-transformer"](width=10).build((9,), 7, seed=0)


@pytest.mark.parametrize(("stem", "sides"), [("7x7", [8, 4, 2, 1]), ("3x3", [32, 16, 8, 4])])
def test_the_stem_decides_the_size_of_the_maps(stem, sides):
    model = resnet50(stem=stem, norm="group").build(CIFAR, 10, seed=0)
    seen = []
    for stage in range(1, 5):
        model.get_submodule(f"stage{stage}").register_forward_hook(
            lambda *call: seen.append(call[2].shape[1:])
        )
    model(images(CIFAR, batch=1))
    assert seen == [(256 << stage, runner, runner) for stage, runner in enumerate(sides)]


def test_a_vision_transformer_has_torchs_encoder_between_patches_and_classifier():
    model = MODELS["vit"](patch=4, width=12, depth=2, heads=3).build((2, 8, 12), 5, seed=0).double()
    layer = torch.nn.TransformerEncoderLayer(12, 3, 48, 0.0, "gelu", batch_first=True, norm_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    for block, own in zip(encoder.layers, model.blocks, strict=True):
        with torch.no_grad():
            block.self_attn.in_proj_weight.copy_(own.attention.weight)
            block.self_attn.in_proj_bias.copy_(own.attention.bias)
        pairs = [(block.self_attn.out_proj, own.output), (block.norm1, own.attention_norm)]
        pairs += [(block.norm2, own.forward_norm), (block.linear1, own.widen), (block.linear2, own.narrow)]
        for theirs, ours in pairs:
            theirs.load_state_dict(ours.state_dict())
    x = images((2, 8, 12), batch=3).double()
    patches = torch.stack([x[:, :, i : i + 4, j : j + 4].flatten(1) for i in (0, 4) for j in (0, 4, 8)], 1)
    tokens = patches @ model.patches.weight.flatten(1).T + model.patches.bias
    tokens = torch.cat([model.token.expand(3, 1, 12), tokens], 1) + model.positions
    features = model.norm(encoder(tokens))[:, 0]
    torch.testing.assert_close(model(x), features @ model.classifier.weight.T + model.classifier.bias)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("vit:patch=5", CIFAR, "multiples of patch, 5 pixels, but a sample has shape 3x32x32"),
        ("vit:width=100", CIFAR, "vit: width is 100; it must be a multiple of heads, 3"),
        ("mobilenetv2", (784,), "'mobilenetv2' takes images .* but a sample has shape 784"),
    ],
)
def test_models_for_images_name_what_does_not_fit(text, shape, message):
    with pytest.raises(HoldfastError, match=message):
        parse_model(text).build(shape, 10, seed=0)


@pytest.mark.parametrize(("resolution", "side"), [("large", 1), ("small", 4)])
def test_the_resolution_decides_the_size_of_mobilenets_last_map(resolution, side):
    model = MODELS["mobilenetv2"](norm="group", resolution=resolution).build(CIFAR, 10, seed=0)
    seen = []
    model.last.register_forward_hook(lambda *call: seen.append(call[2].shape[1:]))
    model(images(CIFAR, batch=1))
    assert seen == [(1280, side, side)]
    depthwise = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.groups > 1]
    assert len(depthwise) == 17
    assert all(m.groups == m.in_channels == m.out_channels for m in depthwise)


@pytest.mark.parametrize("factory", [resnet18, resnet50])
def test_group_norm_has_the_parameters_of_batch_norm_and_no_buffers(factory):
    batch, group = (factory(norm=norm, stem="3x3").build((1, 8, 8), 4, seed=0) for norm in ("batch", "group"))
    assert count(batch) == count(group)
    assert list(batch.buffers())
    assert not list(group.buffers())
    assert batch(images((1, 8, 8))).shape == group(images((1, 8, 8))).shape == (2, 4)


def test_resnet_convolutions_start_as_kaiming_fan_out():
    model = resnet18().build(CIFAR, 10, seed=0)
    last = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)][-1]
    assert last.weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)


LANES = sorted({*PAPER_SHAPES, "cnn", "mlp", "linear"} - {"mlp-resnet18"})


OTHERS = ["resnet18:norm=group,stem=3x3", "resnet50:norm=group", "mobilenetv2:norm=group", "vit:depth=2"]


@pytest.mark.parametrize("name", [*LANES, *OTHERS])
def test_models_run_as_lanes_with_each_lanes_own_gradient(name):
    shape = PAPER_SHAPES.get(name, (1, 8, 8))
    spec = parse_model(name)
    models = [spec.build(shape, 10, seed) for seed in (0, 1)]
    x = torch.stack([images(shape, seed=seed) for seed in (0, 1)])
    y = torch.tensor([[1, 7], [2, 2]])
    params, buffers = stack_module_state(models)
    assert not buffers

    def loss(params, x, y):
        return torch.nn.functional.cross_entropy(functional_call(models[0], params, (x,)), y)

    lanes = vmap(grad(loss))(params, x, y)
    for lane, model in enumerate(models):
        torch.nn.functional.cross_entropy(model(x[lane]), y[lane]).backward()
        for key, parameter in model.named_parameters():
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(lanes[key][lane], parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-9)


def test_no_layer_works_in_place():
    for name in MODELS:
        shape = (8,) if name in TOKENS else PAPER_SHAPES.get(name, CIFAR)
        for module in MODELS[name]().build(shape, 10, seed=0).modules():
            assert not getattr(module, "inplace", False), name


def test_weights_are_a_function_of_the_seed_alone():
    spec = cnn()
    first = spec.build((1, 8, 8), 10, seed=5).state_dict()
    torch.rand(3)
    before = torch.random.get_rng_state()
    again = spec.build((1, 8, 8), 10, seed=5).state_dict()
    other = spec.build((1, 8, 8), 10, seed=6).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_models_are_parsed_from_text():
    assert parse_model("cnn") == cnn() == ModelSpec("cnn")
    assert parse_model("mlp:64,32") == parse_model("mlp:hidden=64,32") == mlp(64, 32)
    assert parse_model("mlp") == mlp() == mlp(200, 200)
    assert parse_model("resnet18:norm=group") == resnet18(norm="group") != resnet18()
    assert parse_model("resnet50: norm=group, stem=3x3") == resnet50(norm="group", stem="3x3")


@pytest.mark.parametrize("text", [*MODELS, "mlp:64,32", "resnet18:norm=group", "resnet50:stem=3x3"])
def test_a_description_is_plain_data_and_makes_the_same_model(text):
    spec = parse_model(text)
    description = json.loads(json.dumps(spec.describe()))
    assert ModelSpec.from_description(description) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, parse_model(text)}) == 1


def test_descriptions_state_every_option():
    assert mlp(64, 32).describe() == {"name": "mlp", "hidden": [64, 32]}
    assert ModelSpec("resnet18").describe() == {"name": "resnet18", "norm": "batch", "stem": "7x7"}
    assert ModelSpec("ntd-cifar").describe() == {"name": "ntd-cifar"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ntd-cifr", "unknown model 'ntd-cifr'.*ntd-cifar"),
        ("resnet18:nrm=group", "unknown option of model 'resnet18' 'nrm'.*norm"),
        ("resnet18:norm=layer", "norm is 'layer'; it must be batch or group"),
        ("resnet50:stem=5x5", "stem is '5x5'; it must be 7x7 or 3x3"),
        ("mlp:64,wide", "hidden is .*; it must be a list of whole numbers, each at least 1"),
        ("mlp:0", "hidden is .*; it must be a list of whole numbers, each at least 1"),
        ("ntd-cifar:norm=group", "model 'ntd-cifar' takes no options, but was given 'norm'"),
        ("cnn:64", "model 'cnn' takes no options, but was given 'hidden'"),
    ],
)
def test_misspelt_models_raise_errors_with_suggestions(text, words):
    with pytest.raises(HoldfastError, match=words):
        parse_model(text)


def test_a_description_without_a_name_is_refused():
    with pytest.raises(HoldfastError, match="a model needs a name"):
        ModelSpec.from_description({"hidden": [3]})


@pytest.mark.parametrize("name", sorted(PAPER_SHAPES))
def test_papers_networks_name_the_shape_they_take(name):
    wanted = "x".join(map(str, PAPER_SHAPES[name]))
    with pytest.raises(HoldfastError, match=f"'{name}' takes images of {wanted} .* has shape 2x9x9"):
        MODELS[name]().build((2, 9, 9), 10, seed=0)


@pytest.mark.parametrize("name", ["cnn", "resnet18", "ntd-cifar"])
def test_models_for_images_refuse_vectors(name):
    with pytest.raises(HoldfastError, match=r"takes images .* has shape 20; .*'mlp'"):
        MODELS[name]().build((20,), 10, seed=0)


def test_the_default_cnn_refuses_tiny_images():
    with pytest.raises(HoldfastError, match="at least 4x4 pixels, but a sample has shape 1x3x9"):
        cnn().build((1, 3, 9), 10, seed=0)


def test_runs_do_not_share_initial_weights():
    spec = parse_model("mlp:8")
    first = spec.build((1, 4, 4), 3, seed=0)
    untouched = {name: value.clone() for name, value in first.state_dict().items()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    again = spec.build((1, 4, 4), 3, seed=0).state_dict()
    assert all(torch.equal(again[name], value) for name, value in untouched.items())
    other = spec.build((1, 4, 4), 3, seed=1).state_dict()
    assert not all(torch.equal(other[name], value) for name, value in untouched.items())
