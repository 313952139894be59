"""Any torch network as a Pyro model: priors on its weights, and a likelihood."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.func import functional_call

from nclbayes.data.checking import AllowedTargets, shown, whole_number
from nclbayes.errors import DataError, ModelError, SettingError
from nclbayes.isolation.autocasting import as_called
from nclbayes.isolation.failures import running
from nclbayes.nn.likelihoods import Likelihood
from nclbayes.priors import Scaled
from nclbayes.watch.rows import single
from nclbayes.watch.sites import FROZEN

_SCALED = Scaled()


class BayesianNetwork(PyroModule):
    """A Pyro model made of a network, a likelihood and a prior; the network's class is left as it is.

    Every learnable parameter of the network becomes a latent site of the same name, in float32 at least; the network
    uses it in its own precision. Frozen ones (``requires_grad=False``) stay as they are; those that are frozen later
    stay as the posterior has them or, where no task has learnt them, as the network has. The network's present
    parameters are where learning starts, whatever the prior's mean is.

    The model is called as ``model(*inputs, target, **context)`` to learn, and without the target to predict.

    Args:
        net: Any module; examples lie along the first dimension of its inputs and its output. What ``torch.compile``
            made of one is learnt as it was before.
        likelihood: What the output means.
        prior: By default :func:`ncl.priors.scaled(1.0) <nclbayes.priors.scaled>`, as wide as each layer wants; or
            ``Normal(loc, scale)`` for all weights; or a mapping from patterns such as ``"*.bias"`` to such, of which
            the first that matches a parameter's name counts; or a callable ``prior(name, parameter)``.
        inputs: How many positional inputs the network takes. A mapping, as in a batch of a task that names its target,
            is one input, and its parts are keyword arguments of the network.
        mask: A function of those inputs that returns which targets count (padding does not), if not all do.
        weight: A function of those inputs that returns what each target counts, if not once each (Normal likelihoods).
        output: A function of what the network returns that picks the tensor of outputs; None: that is what it
            returns, or the `logits` of it.

    Raises:
        SettingError: If a parameter has no prior, or one that is not a Normal of a fitting shape.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> model = ncl.BayesianNetwork(torch.nn.Linear(4, 3), ncl.Categorical())
        >>> sorted(model.initial_values())
        ['bias', 'weight']
        >>> model(torch.zeros(2, 4)).batch_shape
        torch.Size([2])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Any = _SCALED,
        *,
        inputs: int = 1,
        mask: Callable[..., Tensor] | None = None,
        weight: Callable[..., Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        given: object = likelihood
        if not isinstance(given, Likelihood):
            what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
            raise SettingError(f"The likelihood must be one such as Categorical() or Normal(0.1), not {what}.")
        network: object = net
        if not isinstance(network, nn.Module):
            raise SettingError(f"The network `net` must be a torch module, not {shown(network)}.")
        net = _uncompiled(net)
        functions: dict[str, object] = {"mask": mask, "weight": weight, "output": output}
        for name, function in functions.items():
            if function is not None and not callable(function):
                of = "output" if name == "output" else "inputs"
                raise SettingError(f"{name} must be a function of the network's {of}, not {shown(function)}.")
        self.likelihood = likelihood
        self.inputs = whole_number("inputs", inputs)
        self.mask = mask
        self.weight = weight
        self.output = output
        # Kept where PyroModule does not look: it would register the network's parameters with the param store.
        self._modules["net"] = net
        self._priors: dict[str, Any] = {}
        self._weights: dict[str, torch.Size] = {}
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                normal = _prior_of(prior, name, parameter, net)
                self._weights[name] = parameter.shape
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                for part in ("loc", "scale"):
                    value = getattr(normal, part).to(parameter.device, dtype).detach().clone()
                    self.register_buffer(_buffer(part, name), value, persistent=False)

    def with_prior(self, prior: Any) -> BayesianNetwork:
        """The same network and likelihood, under another prior.

        Args:
            prior: The prior.

        Returns:
            A new model, which shares the network.

        Raises:
            SettingError: If it is of a class of your own, which only you can make anew.
        """
        if type(self) is not BayesianNetwork:
            raise SettingError(f"{type(self).__name__} is a class of your own: make one with the other prior.")
        return BayesianNetwork(
            *(self.network, self.likelihood, prior),
            inputs=self.inputs,
            mask=self.mask,
            weight=self.weight,
            output=self.output,
        )

    @property
    def network(self) -> nn.Module:
        """The network, as it was passed in; of a compiled one, the network that was compiled."""
        net = self._modules["net"]
        assert net is not None
        return net

    def initial_values(self) -> dict[str, Tensor]:
        """Where learning starts: copies of the network's own parameters, by site; in float32 at least."""
        parameters = dict(self.network.named_parameters())
        learnable = (name for name in self._weights if parameters[name].requires_grad)
        return {name: single(parameters[name].detach()).clone() for name in learnable}

    def forward(self, *args: Any, **context: Any) -> Any:
        """Sample the weights, run the network, state the likelihood.

        Args:
            *args: The network's inputs, then the target; without the target, it is sampled.
            **context: Keyword arguments of the network, such as ``head=2``.

        Returns:
            The distribution of the targets.

        Raises:
            DataError: If the number of arguments is neither that of the inputs nor one more.
        """
        self._check_count(args)
        inputs, target = args[: self.inputs], args[self.inputs] if len(args) > self.inputs else None
        places = _places(self.network)
        own = {name: parameter for parameter, names in places.items() for name in names}
        weights: dict[str, Tensor] = {}
        for name, prior in self._site_priors().items():
            infer = None if own[name].requires_grad else {FROZEN: own[name]}
            value = _as_used(pyro.sample(name, prior, infer=infer), own[name])
            weights |= dict.fromkeys(places[own[name]], value)
        arguments, named = _called_with(inputs, context)
        # Torch itself would swap the weight of a module that has two names twice, and not find the way back.
        output = self._picked(functional_call(self.network, weights, arguments, named, tie_weights=False))
        mask, weight = (None if f is None else f(*inputs) for f in (self.mask, self.weight))
        return self.likelihood.observe(output, target, mask, weight)

    def check(self, *args: Any, **context: Any) -> AllowedTargets | None:
        """Refuse data that do not fit the network or the likelihood, before anything is learnt from them.

        Args:
            *args: The network's inputs and the target.
            **context: Keyword arguments of the network.

        Returns:
            The values that the targets of other examples may have, where the likelihood knows them.

        Raises:
            DataError: If shapes, dtypes or values do not fit.
            ModelError: If the network returns something else than a tensor of outputs.
        """
        self._check_count(args)
        inputs, target = args[: self.inputs], args[-1]
        with running(inputs, "The network"), torch.no_grad(), as_called():
            arguments, named = _called_with(inputs, context)
            output = self._picked(self.network(*arguments, **named))
        if not isinstance(target, Tensor) or len(args) == self.inputs:
            raise DataError(f"There are no targets: the network's {self.inputs} input(s) must be followed by a tensor.")
        self.likelihood.check(output, target)
        return self.likelihood.allowed(output)

    def _picked(self, returned: Any) -> Tensor:
        """The tensor of outputs in what the network returned."""
        if self.output is not None:
            return _checked_output(self.output(returned))
        logits = None if isinstance(returned, Tensor) else getattr(returned, "logits", None)
        return _checked_output(returned if logits is None else logits)

    def _check_count(self, args: tuple[Any, ...]) -> None:
        if len(args) not in (self.inputs, self.inputs + 1):
            raise DataError(
                f"The model takes {self.inputs} input(s) and a target, but was called with {len(args)} arguments. Set "
                "`inputs` of the BayesianNetwork to the number of the network's inputs."
            )

    def _site_priors(self) -> dict[str, Any]:
        """The prior of every site; built once, and again when the model has moved."""
        if not self._priors:
            for name, shape in self._weights.items():
                loc, scale = (self._buffers[_buffer(part, name)] for part in ("loc", "scale"))
                assert loc is not None
                assert scale is not None
                loc, scale = (single(part).expand(shape) for part in (loc, scale))
                self._priors[name] = dist.Normal(loc, scale).to_event(len(shape))
        return self._priors

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._priors = {}
        return super()._apply(*args, **kwargs)


def _buffer(part: str, name: str) -> str:
    return f"prior_{part}_{name.replace('.', '__')}"


def _places(net: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Where a network holds each parameter, which may be in several modules; each module under one of its names."""
    found: dict[nn.Parameter, list[str]] = {}
    for prefix, module in net.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append(f"{prefix}.{name}" if prefix else name)
    return found


def _uncompiled(net: nn.Module) -> nn.Module:
    """The network in what ``torch.compile`` makes of one, under whose names it is known and saved."""
    inner = getattr(net, "_orig_mod", None)
    if not isinstance(inner, nn.Module):
        return net
    warnings.warn(
        "The network was compiled by torch.compile, and is learnt as it was before: what the compiler makes of it "
        "cannot be watched. The weights are the same; hand over the network itself.",
        stacklevel=3,
    )
    return inner


def _as_used(value: Tensor, parameter: Tensor) -> Tensor:
    """The value of a site as the network uses it: where its parameter is of half precision, rounded to that."""
    is_half = parameter.dtype in (torch.float16, torch.bfloat16)
    return value.to(parameter.dtype) if is_half else value


def _called_with(inputs: tuple[Any, ...], context: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the network: the parts of mappings are the latter."""
    named = dict(context)
    for mapping in (item for item in inputs if isinstance(item, Mapping)):
        named |= mapping
    return tuple(item for item in inputs if not isinstance(item, Mapping)), named


def _checked_output(output: object) -> Tensor:
    """What a network returned, if a likelihood can be made of it."""
    if not isinstance(output, Tensor):
        raise ModelError(
            f"The network returned {shown(output) if output is None else f'a {type(output).__name__}'}; it must return "
            "one tensor of outputs, or an object that has them as `logits`. Say which with `output`, as in "
            "BayesianNetwork(..., output=lambda returned: returned[0])."
        )
    is_plain = output.is_floating_point() and output.layout is torch.strided and not output.is_meta
    if not is_plain or output.ndim == 0 or 0 in output.shape[1:]:
        raise ModelError(
            f"The network returned a tensor of shape {tuple(output.shape)}, {output.dtype}, {output.layout}, on "
            f"{output.device}; it must be one of floating-point outputs, with examples along the first dimension."
        )
    return single(output)


def _prior_of(prior: Any, name: str, parameter: Tensor, net: nn.Module) -> Any:
    """The Normal that a prior gives a parameter, as a base distribution whose loc and scale broadcast to it."""
    if isinstance(prior, Mapping):
        matching = next((p for pattern, p in prior.items() if fnmatchcase(name, str(pattern))), None)
        if matching is None:
            raise SettingError(
                f"No pattern of the prior ({', '.join(map(repr, prior))}) matches the parameter '{name}'. Add one, or "
                "'*' as the last, or freeze the parameter."
            )
        return _prior_of(matching, name, parameter, net)
    found: Any
    if isinstance(prior, torch.distributions.Distribution):
        found = prior
    elif isinstance(prior, Scaled):
        found = prior.of(net, name)
    elif callable(prior) and not isinstance(prior, type):
        found = prior(name, parameter)
    else:
        what = shown(prior) if isinstance(prior, type) else f"a {type(prior).__name__}"
        raise SettingError(
            "The prior must be one such as ncl.priors.scaled(1.0) or dist.Normal(0.0, 1.0), a mapping from patterns of "
            f"names to such, or a function of name and parameter, not {what}."
        )
    base = found
    while isinstance(base, torch.distributions.Independent):
        base = base.base_dist
    if not isinstance(base, torch.distributions.Normal):
        raise SettingError(f"The prior of '{name}' must be a Normal, not {type(base).__name__}.")
    try:
        base.loc.expand(parameter.shape)
    except RuntimeError:
        raise SettingError(
            f"The prior of '{name}' has shape {tuple(base.loc.shape)}, which does not fit {tuple(parameter.shape)}."
        ) from None
    if not bool(torch.isfinite(base.loc).all() and torch.isfinite(base.scale).all() and (base.scale > 0).all()):
        raise SettingError(f"The prior of '{name}' must have a finite mean and a positive, finite scale.")
    return base
