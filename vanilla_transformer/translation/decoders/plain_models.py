"""Whether the fast decoders may read a model's weights, and whether the model has changed since they did.

The fast decoders read weights and compute the paper's equations with them. Adapters, hooks and quantised layers, among
others, make a model compute something else with the same weights, or keep weights in a form that cannot be read.
"""

import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from vanilla_transformer.errors import UserError
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration


# These compute Eq. 1; other names may be functions that users register.
_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# These act only in training mode, or only when parameters are initialised.
_WITHOUT_EFFECT = frozenset(
    {"training", "p", "attention_dropout", "gradient_checkpointing", "initial_fan_out", "name_or_path", "loss_type"}
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTENTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
# The hooks that `output_attentions` and `output_hidden_states` leave behind only record outputs.
_RECORDING_HOOKS = "transformers.utils.output_capturing"
# Elements of each tensor that are compared to notice a change.
_SAMPLES = 64


def why_not_plain(model: VanillaTransformerForConditionalGeneration) -> str | None:
    """Why a model may compute something different from the paper's equations with its weights.

    A model is safe if its modules, their settings and the shapes of their parameters are those that its configuration
    creates; if its parameters are ordinary floating-point tensors of one dtype in the memory of one device; and if it
    has no hooks.

    Args:
        model: The model.

    Returns:
        A clause that names the first difference; `None` if there is none.
    """
    if nn.modules.module._has_any_global_hook():
        return "there are hooks on all modules of this process"
    if model.config._attn_implementation not in _ATTENTION:
        return f"its attention is {model.config._attn_implementation}"
    if type(model) is not VanillaTransformerForConditionalGeneration:
        return f"it is a {_name(type(model))}"
    with torch.device("meta"):
        reference = VanillaTransformerForConditionalGeneration(deepcopy(model.config))
    expected = dict(reference.named_modules(remove_duplicate=False))
    found = dict(model.named_modules(remove_duplicate=False))
    for name, module in found.items():
        place = name or "the model"
        if name not in expected or type(module) is not type(expected[name]):
            return f"{place} is a {_name(type(module))}"
        if (difference := _difference(module, expected.pop(name))) is not None:
            return f"{place} {difference}"
    if expected:
        return f"{next(iter(expected))} is missing"
    return _why_not_readable(model)


def _difference(module: nn.Module, reference: nn.Module) -> str | None:
    """How a module differs from a reference module of the same class, as a clause; `None` if it does not."""
    for hook in chain.from_iterable(getattr(module, kind).values() for kind in _HOOKS):
        if getattr(hook, "__module__", None) != _RECORDING_HOOKS:
            return "has a hook"
    own, its = vars(module), vars(reference)
    if replaced := own.keys() & _methods(type(module)):
        return f"has a `{min(replaced)}` of its own"
    for key, value in its.items():
        is_setting = value is None or isinstance(value, (bool, int, float, str, tuple))
        if is_setting and not key.startswith("_") and key not in _WITHOUT_EFFECT and own.get(key) != value:
            return f"has a changed `{key}`"
    for kind in ("_parameters", "_buffers"):
        shapes, wanted = (
            {key: value if value is None else tuple(value.shape) for key, value in tensors[kind].items()}
            for tensors in (own, its)
        )
        if shapes != wanted:
            return "has other parameters than its configuration says"
    if module.training and (
        getattr(module, "attention_dropout", 0.0) or (isinstance(module, nn.Dropout) and module.p)
    ):
        return "is in training mode, in which dropout acts"
    return None


def _why_not_readable(model: nn.Module) -> str | None:
    """Why a model's parameters or buffers cannot be read, as a clause; `None` if they can."""
    first = next(model.parameters())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if type(tensor) not in (nn.Parameter, torch.Tensor):
            return f"{name} is a {_name(type(tensor))}"
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            return f"{name} is not a dense floating-point tensor"
        if tensor.is_meta or tensor.data_ptr() == 0:
            return f"{name} is not in memory"
        if (tensor.device, tensor.dtype) != (first.device, first.dtype):
            return "its parameters have several dtypes or devices"
    return None


@cache
def _methods(kind: type) -> frozenset[str]:
    """Names of the methods that torch's and this package's classes define for a class of modules."""
    return frozenset(
        name
        for base in kind.__mro__
        if base is nn.Module or base.__module__.split(".")[0] in ("torch", __name__.split(".")[0])
        for name, value in vars(base).items()
        if callable(value) and (name == "_call_impl" or not name.startswith("_")) and name != "extra_repr"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Snapshot:
    """A record of the model that a decoder was made from, to notice later changes.

    It notices a changed structure, replaced parameters, and edits that torch counts. torch does not count edits
    through `.data`, NumPy or another process. Such an edit is noticed if it changes one of 64 elements spread over a
    tensor, as an optimiser step or a merged adapter does; an edit of a few rows of a matrix is not noticed.

    Args:
        model: A model for which `why_not_plain` has no reason.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration):
        self._model = model
        self._modules = list(model.modules())
        self._objects = _objects(model, self._modules)
        self._tensors = [*model.parameters(), *model.buffers()]
        self._states = self._read_states()
        self._samples = [_spread(tensor.detach()) for tensor in self._tensors]
        self._numbers = self._read_numbers()

    def holds(self) -> bool:
        """Whether no change is noticed."""
        objects = _objects(self._model, self._modules)
        return (
            len(objects) == len(self._objects)
            and all(map(is_, objects, self._objects))
            and self._read_states() == self._states
            and torch.equal(self._read_numbers(), self._numbers)
        )

    def _read_states(self) -> list[tuple[Any, ...]]:
        return [
            # Tensors made in inference mode have no count of edits.
            (tensor.data_ptr(), tensor.dtype, tensor.shape, None if tensor.is_inference() else tensor._version)
            for tensor in self._tensors
        ]

    def _read_numbers(self) -> torch.Tensor:
        # As bytes, because NaN is not equal to NaN.
        return torch.cat(self._samples).view(torch.uint8)


def _objects(model: nn.Module, modules: Sequence[nn.Module]) -> list[Any]:
    """The objects that make up a model, compared by identity: modules, classes, settings, parameters and hooks.

    Args:
        model: The model.
        modules: All of its modules; others in their place are among what these hold.
    """
    found = [model.config._attn_implementation, nn.modules.module._has_any_global_hook()]
    # Before each call of a translator: a generator and a walk through the modules would take four times as long.
    for module in modules:
        own = vars(module)
        found.append(type(module))
        found += own.values()
        for kind in _CONTENTS:
            if content := own[kind]:
                found += content.values()
    return found


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """A view of about 64 elements spread over a tensor."""
    # An odd step, so that they are not all in one column.
    return tensor.flatten()[:: tensor.numel() // _SAMPLES | 1]


def unwrapped(model: Any) -> Any:
    """Remove the wrappers of `torch.compile` and of PEFT, if the model computes the same without them.

    Args:
        model: Anything.

    Returns:
        The model inside; the argument itself if it is no such wrapper.

    Raises:
        UserError: An adapter acts in PEFT's wrapper, and not in the model's layers.
    """
    # If there is such a wrapper, its library has been imported.
    compiled, peft = sys.modules.get("torch._dynamo.eval_frame"), sys.modules.get("peft")
    while True:
        if compiled is not None and isinstance(model, compiled.OptimizedModule):
            model = model._orig_mod
        elif peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
            _check_adapters(model)
            model = model.get_base_model()
        else:
            return model


def _check_adapters(model: Any) -> None:
    """Refuse adapters that need PEFT's own `forward`: prompts, mixtures, and adapters that tokens activate."""
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        takes_more = kind in ("XLORA", "POLY") or getattr(config, "alora_invocation_tokens", None)
        if config.is_prompt_learning or takes_more:
            raise UserError(
                f"The adapter {name} ({kind}) changes the calls of the model and not its layers, which the translator "
                "cannot do; translate with the `generate` of the PeftModel."
            )
