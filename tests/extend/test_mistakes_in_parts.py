"""Mistakes in a package's parts: each is refused before or at the first steps, with the setting and a remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megascale.api import load_config, train
from megascale.config import LrConfig
from megascale.config.parts import ACTIVATIONS, CALLBACKS, LR_SCHEDULES, OPTIMIZERS, SINKS, OptimizerFacts
from megascale.core.batch import SampleFields
from megascale.core.inventory import MLP_PARTS, PartInventory, layer_inventory
from megascale.data.dataset.formats import FORMATS, open_tokens
from megascale.data.dataset.token_file import TokenFile
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.model import mlp, norm
from megascale.observe import metrics
from megascale.ops import activation
from megascale.ops.token_loss import TokenLogits
from megascale.optim import learning_rate, rules
from megascale.optim.base import UpdateRule
from megascale.train import callbacks
from megascale.train.part_checks import check_activation, check_norm, check_token_loss
from tests.conftest import lines
from tests.extend import parts

CPU = torch.device("cpu")


def cross_entropy(logits: TokenLogits) -> torch.Tensor:
    return logits.log_sum_exp() - logits.target_logits()


def scale_in_place(logits: TokenLogits) -> torch.Tensor:
    logits.values.detach().mul_(2.0)
    return cross_entropy(logits)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no second case")


LOSS_MISTAKES: dict[str, tuple[Callable[[TokenLogits], Any], str]] = {
    "sum": (lambda logits: cross_entropy(logits).sum(), r"shape \[\] instead of \[6\]; return the loss of each token"),
    "column": (lambda logits: cross_entropy(logits)[:, None], r"shape \[6, 1\] instead of \[6\]"),
    "nothing": (lambda logits: None, "returned NoneType"),
    "integers": (lambda logits: cross_entropy(logits).long(), "torch.int64; return a floating-point tensor"),
    "detached": (lambda logits: cross_entropy(logits).detach(), "no gradient with respect to logits.values"),
    "constant": (lambda logits: logits.values.new_zeros(6), "no gradient with respect to logits.values"),
    "in place": (scale_in_place, "changes logits.values or logits.targets in place"),
    "targets": (lambda logits: (logits.targets.zero_(), cross_entropy(logits))[1], "in place"),
    "mixed": (lambda logits: cross_entropy(logits).flip(0), "depends on other tokens"),
    "scaled by the mean": (lambda logits: cross_entropy(logits) * cross_entropy(logits).mean(), "other tokens"),
    "exception": (lambda logits: cross_entropy(logits) / (1 // 0), "raised ZeroDivisionError"),
    "backward": (lambda logits: FailingBackward.apply(cross_entropy(logits)), "'s backward raised NotImplementedError"),
}


@pytest.mark.parametrize("mistake", LOSS_MISTAKES)
def test_a_loss_with_a_mistake_is_refused(mistake):
    loss, message = LOSS_MISTAKES[mistake]
    with pytest.raises(ConfigError, match=rf"train\.loss=own: the loss.*{message}"):
        check_token_loss("train.loss=own", loss, 20, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_right_loss_is_accepted(dtype):
    check_token_loss("train.loss=own", cross_entropy, 20, CPU, dtype)


def add_noise(logits: TokenLogits) -> torch.Tensor:
    loss = cross_entropy(logits)
    return loss + torch.rand_like(loss)


def test_a_random_loss_is_accepted():
    check_token_loss("train.loss=own", add_noise, 20, CPU, torch.float32)


@pytest.fixture
def own_activation() -> Iterator[Callable[..., None]]:
    """Check an activation under the name `own`."""

    def check(function: Callable[[torch.Tensor], Any], gated: bool = False) -> None:
        activation.register("own", activation.Activation(function, "own"), gated)
        check_activation("own", 8, CPU, torch.float32)

    yield check
    for registry in (ACTIVATIONS, activation.ACTIVATION_OPERATORS):
        registry.pop("own", None)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.relu_(), "changes its argument in place"),
        (lambda x: torch.relu(x).double(), "returned torch.float64 for torch.float32"),
        (lambda x: torch.relu(x)[..., :4], r"shape \[6, 2, 4\] instead of \[6, 2, 8\]"),
        (lambda x: torch.relu(x).detach(), "no gradient"),
        (lambda x: torch.from_numpy(np.maximum(x.detach().numpy(), 0)), "no gradient"),
        (lambda x: None, "returned NoneType"),
        (torch.nn.ReLU, "returned ReLU"),
        (torch.nn.PReLU(), "a module with the tensors weight, which are neither trained nor saved"),
        (torch.nn.BatchNorm1d(8), "running_mean"),
        (lambda x: torch.nn.functional.rrelu(x, training=True), "is random"),
        (lambda x: torch.relu(x) / x.abs().max(), "depends on other tokens"),
    ],
)
def test_an_activation_with_a_mistake_is_refused(own_activation, function, message):
    with pytest.raises(ConfigError, match=rf"model\.activation=own: the activation.*{message}"):
        own_activation(function)


def test_right_activations_are_accepted(own_activation):
    own_activation(torch.nn.ReLU())
    activation.ACTIVATION_OPERATORS.pop("own")
    ACTIVATIONS.pop("own")
    own_activation(lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], gated=True)


@pytest.fixture
def own_norm() -> Iterator[Callable[..., None]]:
    """Check a norm under the name `own`."""

    def check(function: Callable[..., Any], bias: bool = False) -> None:
        norm.register("own", norm.NormOperators(function), bias)
        check_norm("own", 8, CPU, torch.float32)

    yield check
    for registry in (norm.NORMS, norm.NORM_OPERATORS):
        registry.pop("own", None)


def divide_by_mean(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(
    ("function", "bias", "message"),
    [
        (lambda x, weight, bias, eps: x / (x.abs().mean(-1, keepdim=True) + eps), False, "with respect to its weight"),
        (divide_by_mean, True, "with respect to its bias"),
        (lambda x, weight, bias, eps: x.detach() * weight, False, "with respect to its argument"),
        (lambda x, weight, bias, eps: x.div_(x.abs().mean(-1, keepdim=True)) * weight, False, "in place"),
        (lambda x, weight, bias, eps: x / x.std() * weight, False, "depends on other tokens"),
        (lambda x, weight, bias, eps: x.double() * weight, False, "returned torch.float64"),
        (lambda x, weight, bias, eps: x * weight + bias, False, "raised TypeError"),
        (lambda x, weight: x * weight, False, "raised TypeError"),
        (lambda x, weight, bias, eps: None, False, "returned NoneType"),
    ],
)
def test_a_norm_with_a_mistake_is_refused(own_norm, function, bias, message):
    with pytest.raises(ConfigError, match=rf"model\.norm=own: the norm.*{message}"):
        own_norm(function, bias)


def test_a_right_norm_is_accepted(own_norm):
    own_norm(divide_by_mean)


@pytest.fixture
def own_schedule() -> Iterator[Callable[[Callable[..., Any]], list[float]]]:
    """Check a schedule under the name `own`, and return its rates of ten steps."""

    def check(schedule: Callable[..., Any]) -> list[float]:
        learning_rate.register("own", schedule, "own")
        lr = LrConfig(schedule="own", peak=1.0)
        learning_rate.check_schedule(lr, 10)
        return [learning_rate.compute_learning_rate(lr, step, 10) for step in range(1, 11)]

    yield check
    for registry in (LR_SCHEDULES, learning_rate.SCHEDULES):
        registry.pop("own", None)


calls = itertools.count()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda lr, step, end: 1 - 2 * step / end, r"returned -0\.\d+ for step 6 of 10"),
        (lambda lr, step, end: float("nan"), "returned nan for step 1"),
        (lambda lr, step, end: 1.0 if step < 10 else float("inf"), "returned inf for step 10"),
        (lambda lr, step, end: None, "returned None for step 1"),
        (lambda lr, step, end: "0.1", "returned '0.1'"),
        (lambda lr, step, end: (5 - step) ** 0.5, "return the rate as a number"),
        (lambda step: 1.0, "raised TypeError for step 1"),
        (lambda lr, step, end: 1 / (step - 4), r"returned -0\.3|raised ZeroDivisionError for step 4"),
        (lambda lr, step, end: 0.0, "returned 0 for all of the steps 1 to 10"),
        (lambda lr, step, end: 1.0 + next(calls), "compute the rate from the step alone"),
    ],
)
def test_a_learning_rate_schedule_with_a_mistake_is_refused(own_schedule, schedule, message):
    with pytest.raises(ConfigError, match=rf"lr\.schedule=own.*({message})"):
        own_schedule(schedule)


@pytest.mark.parametrize("kind", [float, np.float32, torch.tensor])
def test_a_rate_may_be_a_number_of_numpy_or_torch(own_schedule, kind):
    rates = own_schedule(lambda lr, step, end: kind(step / 16))
    assert rates == [step / 16 for step in range(1, 11)]
    assert {type(rate) for rate in rates} == {float}


def test_a_run_checks_its_schedule_before_the_first_step(own_schedule, tiny):
    own_schedule(lambda lr, step, end: 1e-3)
    learning_rate.SCHEDULES["own"] = lambda lr, step, end: 1e-3 if step < 4 else -1e-3
    with pytest.raises(ConfigError, match=r"returned -0\.001 for step 4 of 4"):
        train(load_config(tiny, ["--lr.schedule=own", "--train.steps=4"]))
    assert not (tiny.parent / "runs/tiny/metrics.jsonl").exists()


class Misspelt(callbacks.Callback):
    def on_step_end(self, run: Any) -> None:
        raise AssertionError("a run never calls this")


class WithoutArguments(callbacks.Callback):
    def step_ends(self) -> None:  # type: ignore[override]
        pass


class Asynchronous(callbacks.Callback):
    async def step_ends(self, run: Any) -> None:  # type: ignore[override]
        pass


class NeedsArgument(callbacks.Callback):
    def __init__(self, patience: int) -> None:
        pass


class Plain:
    def step_ends(self, run: Any) -> None:
        pass


class Doubles(callbacks.Callback):
    def run_begins(self, run: callbacks.RunView) -> None:
        for chunk in run.engine.chunks:
            chunk.double()


class Freezes(callbacks.Callback):
    def run_begins(self, run: callbacks.RunView) -> None:
        for _, parameter in run.parameters():
            parameter.requires_grad_(False)


class WithoutGradients(callbacks.Callback):
    def run_begins(self, run: callbacks.RunView) -> None:
        torch.set_grad_enabled(False)


class Exits(callbacks.Callback):
    def step_ends(self, run: callbacks.RunView) -> None:
        raise SystemExit(0)


@pytest.fixture
def own_callback(tiny: Path) -> Iterator[Callable[[Any], None]]:
    """Train with a callback under the name `own`."""

    def run(factory: Any) -> None:
        callbacks.register("own", factory)
        train(load_config(tiny, ["--train.callbacks=own", "--train.steps=2"]))

    yield run
    torch.set_grad_enabled(True)
    for registry in (CALLBACKS, callbacks.KINDS):
        registry.pop("own", None)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Misspelt, "Misspelt defines on_step_end, which a run never calls; define run_begins"),
        (WithoutArguments, "WithoutArguments.step_ends cannot be called: too many positional arguments"),
        (Asynchronous, "Asynchronous.step_ends is a coroutine"),
        (NeedsArgument, "missing 1 required positional argument: 'patience'"),
        (Plain, "Plain is not a callback; derive it"),
        (Exits(), "not Exits, which is not callable"),
        (Doubles, "changed the type of .* from torch.float32 to torch.float64"),
        (Freezes, "changed the requires_grad of .* from True to False"),
        (WithoutGradients, r"changed the torch\.is_grad_enabled\(\) from True to False"),
    ],
)
def test_a_callback_with_a_mistake_is_refused_before_the_first_step(own_callback, tiny, factory, message):
    with pytest.raises(ConfigError, match=rf"train\.callbacks=own.*{message}"):
        own_callback(factory)
    assert not (tiny.parent / "runs/tiny/metrics.jsonl").exists() or not lines(tiny.parent / "runs/tiny/metrics.jsonl")


def test_a_callback_that_ends_the_process_is_an_error(own_callback):
    with pytest.raises(TrainingError, match=r"train\.callbacks=own called sys\.exit\(0\); call run\.stop\(\)"):
        own_callback(Exits)


class Emptying:
    def write(self, record: dict[str, Any]) -> None:
        record.clear()

    def close(self) -> None:
        pass


class Recording(Emptying):
    records: list[dict[str, Any]] = []  # noqa: RUF012

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)


@pytest.fixture
def _sinks() -> Iterator[None]:
    Recording.records.clear()
    metrics.register("emptying", lambda request: Emptying())
    metrics.register("recording", lambda request: Recording())
    metrics.register("nothing", lambda request: None)  # type: ignore[arg-type,return-value]
    yield
    for name in ("emptying", "recording", "nothing"):
        SINKS.remove(name)
        metrics.SINK_FACTORIES.remove(name)


@pytest.mark.usefixtures("_sinks")
def test_sinks_get_records_of_their_own_and_need_both_methods(tiny):
    train(load_config(tiny, ["--observe.sinks=emptying,recording", "--train.steps=1"]))
    assert Recording.records[0]["step"] == 1
    with pytest.raises(ConfigError, match=r"observe\.sinks=nothing: NoneType has no method `write`"):
        train(load_config(tiny, ["--observe.sinks=nothing", "--train.steps=2"]))


class Descent(UpdateRule):
    """Gradient descent, with a mistake by the class's attributes."""

    is_announced = True
    writes_master = True
    writes_in_use = True
    replaces_state = False

    def update(self, step: Any, on_updated: Any) -> None:
        for state in self.shards.update_order:
            if self.writes_master:
                state.master.sub_(step.learning_rate * state.shard.grads)
            if self.writes_in_use and state.param_out is not None:
                state.param_out.copy_(state.master)
            if self.replaces_state:
                for part in state.parts:
                    part.state["momentum"] = part.state["momentum"] + 1
            if self.is_announced:
                on_updated(state.shard)


class Unannounced(Descent):
    is_announced = False


class Unchanged(Descent):
    writes_master = False


class Stale(Descent):
    writes_in_use = False


class Replacing(Descent):
    replaces_state = True


class Unfinished(Descent):
    def __init__(self, config: Any, shards: Any) -> None:
        self.config = config


@pytest.fixture
def own_optimizer(tiny: Path) -> Iterator[Callable[..., Any]]:
    """Train with an optimizer under the name `own`."""

    def run(rule: type[UpdateRule], *arguments: str) -> Any:
        rules.register("own", OptimizerFacts(lambda name, shape: ("momentum",), default_peak=0.1), rule)
        return train(load_config(tiny, ["--optimizer.name=own", *arguments]))

    yield run
    for registry in (OPTIMIZERS, rules.RULES):
        registry.pop("own", None)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Unannounced, "called its second argument for 0 of"),
        (Unchanged, "10 updates with gradients and a learning rate above 0 changed no weight"),
        (Stale, r"but not the weights in use \(torch\.bfloat16\)"),
        (Replacing, r'replaced part\.state\["momentum"\]'),
        (Unfinished, r"does not call super\(\)\.__init__"),
    ],
)
def test_an_optimizer_with_a_mistake_is_refused(own_optimizer, rule, message):
    with pytest.raises(ConfigError, match=rf"optimizer\.name=own.*{message}"):
        own_optimizer(rule, "--train.steps=11", "--train.precision=bfloat16")


def test_a_right_optimizer_is_checked_until_it_has_changed_the_weights(own_optimizer):
    assert own_optimizer(Descent, "--train.steps=2", "--train.precision=bfloat16").finished


@pytest.mark.parametrize("names", [None, "momentum", (1,)])
def test_state_names_that_are_not_a_tuple_of_texts_are_refused(names):
    with pytest.raises(ConfigError, match=r"optimizer\.name=own: the state names of a parameter are"):
        rules.register("own", OptimizerFacts(lambda name, shape: names), Descent)
    assert "own" not in rules.RULES


class OwnMlp(parts.ScaledMlp):
    """A dense MLP with a learnt scale."""

    def __init__(self, at: Any) -> None:
        super().__init__(at)
        self.add_mistake()

    def add_mistake(self) -> None:
        pass


class WithBuffer(OwnMlp):
    def add_mistake(self) -> None:
        self.register_buffer("mean", torch.zeros(1))


class WithConstant(OwnMlp):
    def add_mistake(self) -> None:
        self.register_buffer("table", torch.zeros(1), persistent=False)


class WithLinear(OwnMlp):
    def add_mistake(self) -> None:
        self.gate = torch.nn.Linear(2, 2)


class WithTensor(OwnMlp):
    def add_mistake(self) -> None:
        self.gate = torch.ones(2, requires_grad=True)


class Frozen(OwnMlp):
    def add_mistake(self) -> None:
        self.scale.requires_grad_(False)


class WithoutScale(mlp.DenseMlp):
    def __init__(self, at: Any) -> None:
        super().__init__(at)
        self.columns = self.columns[:-1]


class Unused(OwnMlp):
    def forward(self, inner: torch.Tensor, projection: Any) -> Any:
        return mlp.DenseMlp.forward(self, inner * self.scale.data, projection)


@pytest.fixture
def own_mlp(tiny: Path) -> Iterator[Callable[[Any], Any]]:
    """Train with an MLP under the name `own`."""

    def run(module: Any, list_tensors: Any = parts.scaled_tensors) -> Any:
        mlp.register("own", module, PartInventory(list_tensors, parts.scaled_keeps))
        layer_inventory.cache_clear()  # an earlier test may have registered another MLP under the name
        return train(load_config(tiny, ["--model.mlp=own", "--train.steps=2"]))

    yield run
    for registry in (mlp.MLPS, mlp.MLP_MODULES, MLP_PARTS):
        registry.pop("own", None)
    layer_inventory.cache_clear()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (WithBuffer, r"\(WithBuffer\) has the buffer mean, which no checkpoint contains"),
        (WithLinear, r"\(WithLinear\) has the parameter gate\.weight, which would not be trained or saved"),
        (WithTensor, r"\(WithTensor\) has the tensor gate, which would not be trained or saved"),
        (Frozen, r"\(Frozen\) has the parameter scale with requires_grad=False"),
        (WithoutScale, r"layers\.0\.mlp\.scale is declared by the inventory .*, and no module holds it"),
        (Unused, r"layers\.\d\.mlp\.scale: the first step computed no gradient"),
    ],
)
def test_a_module_with_a_mistake_is_refused(own_mlp, module, message):
    with pytest.raises(ConfigError, match=message):
        own_mlp(module)


def test_layers_whose_tensors_share_a_name_are_refused(own_mlp):
    with pytest.raises(ConfigError, match=r"all\.mlp\.\w+\.\w+ is declared more than once"):
        own_mlp(OwnMlp, lambda layer, name: parts.scaled_tensors(layer, "all"))


@pytest.mark.parametrize("module", [OwnMlp, WithConstant])
def test_right_modules_are_accepted(own_mlp, module):
    assert own_mlp(module).finished


class OwnFormat(TokenFile):
    """100 tokens, and the arrays of the class's attributes."""

    array: Any = np.arange(100)
    announced = SampleFields()
    weights: Any = None
    token_positions: Any = None
    starts: Any = None

    def __init__(self, entry: Any) -> None:
        self.prefix = str(entry)
        self.tokens = 100

    @property
    def stream(self) -> Any:
        return self.array

    @property
    def loss_weights(self) -> Any:
        return self.weights

    @property
    def positions(self) -> Any:
        return self.token_positions

    @property
    def document_starts(self) -> Any:
        return self.starts

    @classmethod
    def files(cls, entry: Any) -> list[Path]:
        return [Path(entry)]

    @classmethod
    def fields(cls, entry: Any) -> SampleFields:
        return cls.announced


WEIGHTED = SampleFields(loss_weights=True)
PLACED = SampleFields(positions=True)
DOCUMENTS = SampleFields(max_documents=9)


@pytest.fixture
def own_format() -> Iterator[Callable[..., TokenFile]]:
    """Open a file of a format with the given attributes."""

    def open_file(**attributes: Any) -> TokenFile:
        FORMATS.register("own", type("Own", (OwnFormat,), attributes))
        return open_tokens("tokens.own")

    yield open_file
    FORMATS.pop("own", None)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"array": np.arange(100.0)}, "`stream` has the type float64; return integers"),
        ({"array": np.arange(100) > 1}, "`stream` has the type bool"),
        ({"array": np.zeros((50, 2), int)}, r"`stream` has the shape \[50, 2\], and its `tokens` is 100"),
        ({"array": np.arange(99)}, r"`stream` has the shape \[99\]"),
        ({"array": list(range(100))}, "`stream` is of type list"),
        ({"announced": WEIGHTED}, "announces loss_weights, and its property `loss_weights` is None"),
        ({"announced": WEIGHTED, "weights": np.ones(10)}, r"`loss_weights` has the shape \[10\]"),
        ({"announced": WEIGHTED, "weights": np.ones((100, 1))}, r"`loss_weights` has the shape \[100, 1\]"),
        ({"weights": np.ones(100)}, "`loss_weights`, which its method `fields` does not announce"),
        ({"announced": PLACED, "token_positions": np.arange(100) / 2}, "`positions` has the type float64"),
        ({"announced": DOCUMENTS}, "announces max_documents"),
        ({"starts": np.arange(0, 100, 10)[::-1]}, "has 90 and then 80; return ascending offsets"),
        ({"starts": np.full(10, 10)}, "has 10 and then 10; return ascending offsets in `stream`, not lengths"),
        ({"starts": np.arange(0, 110, 10)}, "has the offsets 0 to 100; offsets are 0 to 99"),
        ({"starts": np.arange(-10, 100, 10)}, "has the offsets -10 to 90"),
        ({"starts": np.arange(0, 100, 10.0)}, "`document_starts` has the type float64"),
    ],
)
def test_a_format_with_a_mistake_is_refused(own_format, attributes, message):
    with pytest.raises(DataError, match=rf"tokens\.own: the format.*{message}"):
        own_format(**attributes)


def test_right_formats_are_accepted(own_format):
    fields = SampleFields(loss_weights=True, positions=True, max_documents=9)
    arrays = {"weights": [1.0] * 100, "token_positions": np.arange(100) % 10, "starts": list(range(0, 100, 10))}
    assert own_format(announced=fields, **arrays).tokens == 100


class Ending:
    """An array of 100 tokens that ends after 50 of them."""

    shape = (100,)

    def __getitem__(self, part: slice) -> Any:
        if part.start is not None and 50 <= part.start < 99:
            raise StopIteration
        return np.arange(100)[part]


class WithoutEnd(Ending):
    """An array whose last token cannot be read."""

    def __getitem__(self, part: slice) -> Any:
        if part.start:
            raise StopIteration
        return np.arange(100)[part]


@pytest.mark.parametrize("stream", [WithoutEnd(), iter(range(100)), {0: 1}])
def test_a_stream_without_slices_is_refused(own_format, stream):
    with pytest.raises(DataError, match="`stream` has no slices up to its 100 tokens"):
        own_format(array=stream)


def test_a_stream_that_ends_early_is_named(own_format):
    file = own_format(array=Ending())
    assert file.read_range(0, 50).tolist() == list(range(50))
    with pytest.raises(DataError, match="reading tokens 60 to 69 raised StopIteration"):
        file.read_range(60, 10)
    with pytest.raises(DataError, match="the stream ends after token 99, and `tokens` is 100"):
        file.read_range(99, 10)
