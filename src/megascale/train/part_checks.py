"""Checks of a package's loss, activation, norm and learning-rate schedule before the first step.

A part that breaks its contract often trains without an error, and its weights are wrong. Each check calls the part with
small random tensors, or with the steps of the run. It needs no other rank, so that all ranks refuse the same part.
Built-in parts are not called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megascale.config import Config, ModelConfig
from megascale.config.parts import ACTIVATIONS, NORMS
from megascale.core.inventory import resolve_layers
from megascale.errors import ConfigError, MegascaleError
from megascale.model.norm import NORM_OPERATORS
from megascale.ops.activation import ACTIVATION_OPERATORS
from megascale.ops.token_loss import TOKEN_LOSSES, TokenLogits, TokenLoss
from megascale.optim.learning_rate import check_schedule

_TOKENS = 6  # rows of the random tensors


def check_parts(config: Config, device: torch.device) -> None:
    """Check the parts of packages that this run uses. Raises ConfigError with the key, the fault and the remedy."""
    check_schedule(config.lr, config.train.steps)
    dtype = getattr(torch, config.train.precision)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        name = config.train.loss
        loss = TOKEN_LOSSES[name]
        if loss is not None and name not in TOKEN_LOSSES.builtin_names:
            assert config.model.vocab_size is not None
            check_token_loss(f"train.loss={name}", loss, config.model.vocab_size, device, dtype)
        for activation, width in _list_activations(config.model).items():
            if activation not in ACTIVATION_OPERATORS.builtin_names:
                check_activation(activation, width, device, dtype)
        for norm in sorted({layer.norms.name for layer in resolve_layers(config.model)}):
            if norm not in NORM_OPERATORS.builtin_names:
                check_norm(norm, config.model.hidden, device, dtype)


def _list_activations(model: ModelConfig) -> dict[str, int]:
    """Return the activations of all layers, by name, with the number of columns of their results."""
    widths = {}
    for layer in resolve_layers(model):
        name = getattr(layer.feed_forward, "activation", model.activation)
        widths[name] = getattr(layer.feed_forward, "width", model.hidden)
    return widths


def check_token_loss(setting: str, loss: TokenLoss, vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless `loss` is a differentiable loss of each token that depends on this token alone.

    Args:
        setting: key and value, for messages.
        dtype: type of the model's weights; logits are float32 or wider.
    """
    wide = torch.promote_types(dtype, torch.float32)
    sizes = torch.linspace(0.25, 4.0, _TOKENS, device=device, dtype=wide)
    values = torch.randn(_TOKENS, vocab_size, device=device, dtype=wide) * sizes[:, None]
    targets = torch.randint(vocab_size, (_TOKENS,), device=device)

    def compute(rows: slice) -> tuple[TokenLogits, Tensor]:
        logits = TokenLogits(values[rows].clone().requires_grad_(), targets[rows].clone())
        return logits, _call(setting, "loss", loss, logits)

    every_row = slice(None)
    with torch.enable_grad():
        logits, result = compute(every_row)
    _require_tensor(setting, "loss", result, (_TOKENS,), "the loss of each token, without a sum or a mean")
    if not result.is_floating_point():
        raise ConfigError(f"{setting}: the loss has the type {result.dtype}; return a floating-point tensor")
    _require_gradient(setting, "loss", result, logits.values, "logits.values")
    if not torch.equal(logits.values, values) or not torch.equal(logits.targets, targets):
        raise ConfigError(
            f"{setting}: the loss changes logits.values or logits.targets in place; use operations without a trailing "
            "underscore, or clone the tensor first"
        )
    with torch.no_grad():
        _, repeated = compute(every_row)
        if not torch.equal(repeated, result):
            return  # a random loss: rows cannot be compared
        _, part = compute(slice(1, 3))
    if part.shape != (2,) or not torch.allclose(part, result[1:3].detach(), rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ConfigError(
            f"{setting}: the loss of a token depends on other tokens of its chunk, whose size depends on the layout; "
            "compute each token's loss from its own row of logits.values and its own target"
        )


def check_activation(name: str, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the activation is a differentiable function of each token without state.

    Args:
        width: number of columns of the activation's result.
        dtype: type of the model's weights and activations.
    """
    setting = f"model.activation={name}"
    function = ACTIVATION_OPERATORS[name].reference
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        states = [key for key, _ in owner.named_parameters()] + [key for key, _ in owner.named_buffers()]
        if states:
            raise ConfigError(
                f"{setting}: the activation is a module with the tensors {', '.join(states)}, which are neither "
                "trained nor saved; register an MLP that declares them as logical tensors (docs/extending.md)"
            )
    is_gated = ACTIVATIONS[name].gated
    if is_gated:
        expected = "half as many columns as its argument, since it is registered with gated=True"
    else:
        expected = "the shape of its argument; an activation that halves the columns is registered with gated=True"
    x = torch.randn(_TOKENS, 2, 2 * width if is_gated else width, device=device, dtype=dtype)
    _check_row_function(setting, "activation", function, x, (_TOKENS, 2, width), expected)


def check_norm(name: str, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the norm is a differentiable function of each token that uses its weight and bias.

    Args:
        width: number of columns.
        dtype: type of the model's weights and activations.
    """
    weight = torch.randn(width, device=device, dtype=dtype).requires_grad_()
    tensors = {"its weight": weight}
    bias = None
    if NORMS[name].bias:
        bias = torch.randn(width, device=device, dtype=dtype).requires_grad_()
        tensors["its bias"] = bias

    def apply_norm(x: Tensor) -> Tensor:
        return NORM_OPERATORS[name].norm(x, weight, bias, 1e-5)

    x = torch.randn(_TOKENS, 2, width, device=device, dtype=dtype)
    _check_row_function(
        f"model.norm={name}", "norm", apply_norm, x, tuple(x.shape), "the shape of its argument", tensors
    )


def _check_row_function(
    setting: str,
    kind: str,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    shape: tuple[int, ...],
    expected: str,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Raise ConfigError unless `function` maps each row of x differentiably to a row of the result.

    Args:
        shape: shape of the result.
        expected: description of the shape, for messages.
        tensors: parameters by name that must get a gradient too.
    """
    # Rows of different sizes, so that statistics over several rows differ from those over fewer.
    x = x * torch.linspace(0.25, 4.0, len(x), device=x.device, dtype=x.dtype)[:, None, None]
    argument = x.clone()
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        # Not a leaf, as in training: autograd refuses operations in place on leaves with another message.
        inner = leaf.clone()
        result = _call(setting, kind, function, inner)
    _require_tensor(setting, kind, result, shape, expected)
    if result.dtype != x.dtype:
        raise ConfigError(
            f"{setting}: the {kind} returned {result.dtype} for {x.dtype}; return the type of its argument, such as "
            "with result.to(x.dtype)"
        )
    with torch.no_grad():
        plain = _call(setting, kind, function, argument)
        if not torch.equal(argument, x) or not torch.equal(inner, x):
            raise ConfigError(
                f"{setting}: the {kind} changes its argument in place, which backward reads again; use the operation "
                "without a trailing underscore"
            )
        if not _is_close(plain, result):
            raise ConfigError(
                f"{setting}: the {kind} is random, and a recomputed or repeated step would get other values; use "
                "model.dropout for noise"
            )
        part = _call(setting, kind, function, x[1:3].clone())
    for name, tensor in {"its argument": leaf, **(tensors or {})}.items():
        _require_gradient(setting, kind, result, tensor, name)
    if not _is_close(part, result[1:3]):
        raise ConfigError(
            f"{setting}: the {kind} of a token depends on other tokens of its micro-batch, which depends on the "
            "layout; compute each token's result from its own row"
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two results differ at most by rounding."""
    return torch.allclose(a.detach().float(), b.detach().float(), rtol=2e-2, atol=1e-3, equal_nan=True)


def _call(setting: str, kind: str, function: Callable[..., Any], argument: object) -> Any:
    """Return the part's result for an argument. Raises ConfigError if the part raises an exception."""
    try:
        return function(argument)
    except MegascaleError:
        raise
    except Exception as error:
        remedy = f"correct the {kind} (MEGASCALE_TRACEBACK=1 shows where)"
        if isinstance(error, RuntimeError) and "inplace" in str(error).replace("-", "").replace(" ", ""):
            remedy = f"the {kind} must not change its argument in place: use operations without a trailing underscore"
        raise ConfigError(f"{setting}: the {kind} raised {type(error).__name__}: {error}; {remedy}") from error


def _require_tensor(setting: str, kind: str, result: object, shape: tuple[int, ...], expected: str) -> None:
    """Raise ConfigError unless the result is a tensor of the shape."""
    if isinstance(result, Tensor):
        if result.shape == shape:
            return
        received = f"a tensor of shape {list(result.shape)} instead of {list(shape)}"
    else:
        received = f"{type(result).__name__} instead of a tensor of shape {list(shape)}"
    raise ConfigError(f"{setting}: the {kind} returned {received}; return {expected}")


def _require_gradient(setting: str, kind: str, result: Tensor, source: Tensor, source_name: str) -> None:
    """Raise ConfigError unless the result has a gradient with respect to the source."""
    remedy = "use differentiable operations, without detach(), item() and NumPy"
    gradient = None
    if result.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(result.sum(), source, allow_unused=True, retain_graph=True)
        except Exception as error:
            raise ConfigError(
                f"{setting}: the {kind}'s backward raised {type(error).__name__}: {error}; correct the backward "
                "(MEGASCALE_TRACEBACK=1 shows where)"
            ) from error
    if gradient is None:
        raise ConfigError(f"{setting}: the {kind} has no gradient with respect to {source_name}; {remedy}")
