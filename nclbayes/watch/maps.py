"""Torch's side of a run: see every call on a weight, and recognise the linear maps among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nclbayes.errors import DataError
from nclbayes.watch.aliases import Alias
from nclbayes.watch.arguments import is_differentiable, tensors_among
from nclbayes.watch.batch_statistics import refuse_batch_statistics
from nclbayes.watch.calls import (
    ADDITIONS,
    CONVOLUTIONS,
    GROUPED_PRODUCTS,
    PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    call_name,
)
from nclbayes.watch.convolutions import convolution_rows, transposed_convolution_rows
from nclbayes.watch.einsum import einsum_rows
from nclbayes.watch.grouped import GroupedRows
from nclbayes.watch.others import Derived, OtherUses, edge_of
from nclbayes.watch.parts import PartRows, adds_to_outputs, part_rows
from nclbayes.watch.recomputing import refuse_recomputation
from nclbayes.watch.rows import ConvolutionRows, ProductRows
from nclbayes.watch.sites import learnable_parameter
from nclbayes.watch.steps import current_mask
from nclbayes.watch.uses import LinearUse, OtherUse, Rows


class MapRecorder(TorchFunctionMode):
    """While active, records each use of the weights that it is told to :meth:`track`.

    A weight is recognised by identity, through transposes, broadcasting and parts of it; no hooks are placed and no
    class is replaced. Any other leaf tensor that requires grad is a learnable parameter without prior, and is refused.

    Args:
        model: Whose parameters a message may have to name.
        examples: How many examples it is given; None if that is not known.

    Attributes:
        eps: How coarse the numbers are that weights were used in: the largest machine epsilon among them.

    Example:
        >>> import torch
        >>> from nclbayes.watch import MapRecorder
        >>> weight = torch.ones(2, 3, requires_grad=True)
        >>> recorder = MapRecorder()
        >>> recorder.track("w", weight)
        >>> with recorder:
        ...     out = torch.nn.functional.linear(torch.ones(5, 3), weight)
        >>> [(use.weight, use.rows.count) for use in recorder.linear]
        [('w', 5)]
    """

    def __init__(self, model: object = None, examples: int | None = None) -> None:
        super().__init__()
        self.linear: list[LinearUse] = []
        self.eps = 0.0
        self._model = model
        self._others = OtherUses(examples)
        self._aliases: dict[int, Alias] = {}
        # Products that a bias may be added to, with their version; and those that have had one added.
        self._open: dict[int, tuple[Tensor, LinearUse, int]] = {}
        self._joined: dict[int, tuple[Tensor, LinearUse]] = {}

    @property
    def others(self) -> list[OtherUse]:
        """Every other differentiable use of a weight."""
        return self._others.uses

    def track(self, site: str, value: Tensor) -> None:
        """Watch one more weight.

        Args:
            site: Its name.
            value: Its value, a leaf that requires grad; the model must use this very tensor.
        """
        self._aliases[id(value)] = Alias(site, value, transposed=False, tensor=value)

    def __enter__(self) -> MapRecorder:
        self._token = _WATCHED.set(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _WATCHED.reset(self._token)
        self._others.finish()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one torch function and note what it does with a weight."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            refuse_batch_statistics(*args, **kwargs)
        out = func(*args, **kwargs)
        if not is_differentiable(out):
            if not torch.is_grad_enabled():
                # Reentrant checkpointing first runs without autograd.
                used = (self._aliases.get(id(tensor)) for tensor in tensors_among(args, kwargs))
                refuse_recomputation(alias.site for alias in used if alias is not None)
            if func is Tensor.__setitem__:
                # It changes a copy of a weight in place, and returns nothing.
                written = tensors_among(args, kwargs)
                self._others.add(func, (alias.site for alias in self._sites_among(written)))
                self._others.add(func, (site for part in self._others.among(written) for site in part.values))
            return out
        if func is Tensor.requires_grad_:
            return out
        tensors = tensors_among(args, kwargs)
        self._part_from_biases(func, tensors)
        found = self._sites_among(tensors)
        derived = self._others.among(tensors)
        if not found and not derived:
            return out
        refuse_recomputation(alias.site for alias in found)
        if isinstance(out, Tensor):
            self.eps = max(self.eps, torch.finfo(out.dtype).eps)
        if len(found) == 1 and not derived and self._follow(func, found[0], out):
            return out
        # Two parts of a weight in one call are no map of it.
        is_clear = len({alias.site for alias in found}) == len(found)
        use = self._linear_use(func, out, args, kwargs) if is_clear else None
        explained = () if use is None else (use.weight, use.bias)
        rest = [
            Derived(alias.tensor, {alias.site: alias.value}, alias.version)
            for alias in found
            if alias.site not in explained
        ]
        if rest or derived:
            self._others.note(func, out, tensors, [*rest, *derived], args, kwargs)
        return out

    def _part_from_biases(self, func: Callable[..., Any], tensors: list[Tensor]) -> None:
        """A product that is used again besides its sum with a bias has two gradients: the bias is none of its own."""
        if not self._joined:
            return
        for tensor in tensors:
            held = self._joined.pop(id(tensor), None)
            if held is not None:
                _, use = held
                assert use.bias is not None
                self.others.append(OtherUse(use.bias, call_name(func)))
                use.bias = None

    def _linear_use(self, func: Callable[..., Any], out: Any, args: Any, kwargs: Any) -> LinearUse | None:
        if func is F.linear:
            return self._linear(func, out, *args, **kwargs)
        if func in PRODUCTS:
            return self._product(func, out, *args, **kwargs)
        if func in CONVOLUTIONS:
            return self._convolution(func, out, *args, **kwargs)
        if func in TRANSPOSED_CONVOLUTIONS:
            return self._transposed_convolution(func, out, *args, **kwargs)
        if func is torch.einsum:
            return self._einsum(func, out, *args, **kwargs)
        if func in GROUPED_PRODUCTS:
            return self._grouped_product(func, out, *args, **kwargs)
        if func in ADDITIONS:
            return self._bias(out, *args, **kwargs)
        return None

    def _sites_among(self, tensors: Iterable[Tensor]) -> list[Alias]:
        found = []
        for tensor in tensors:
            alias = self._aliases.get(id(tensor))
            if alias is not None:
                found.append(alias)
            elif tensor.requires_grad and tensor.is_leaf:
                raise learnable_parameter(self._name_of(tensor))
        return found

    def _name_of(self, parameter: Tensor) -> str:
        named = self._model.named_parameters() if isinstance(self._model, nn.Module) else ()
        return next((name for name, p in named if p is parameter), f"of shape {tuple(parameter.shape)}")

    def _follow(self, func: Callable[..., Any], alias: Alias, out: Any) -> bool:
        """Whether `out` is the weight itself in another view, or views of it, which are then watched too."""
        found = alias.followed(func, out)
        self._aliases |= {id(other.tensor): other for other in found or ()}
        return found is not None

    def _record(
        self, func: Callable[..., Any], out: Tensor, x: Tensor, weight: Alias, bias: Any, transposed: bool, rows: Any
    ) -> LinearUse:
        if weight.part is not None:
            rows = part_rows(rows, weight, transposed)
        mask = current_mask()
        if mask is not None:
            if mask.shape != rows.lead[: mask.ndim]:
                raise DataError(
                    f"valid_steps was given a mask of shape {tuple(mask.shape)}, but {call_name(func)} with weight "
                    f"'{weight.site}' has rows of shape {tuple(rows.lead)}; the mask must cover their first dimensions."
                )
            mask = rows.mask(mask)
        use = LinearUse(
            weight=weight.site,
            bias=None,
            function=func,
            transposed=transposed,
            input=x,
            edge=edge_of(out),
            rows=rows,
            mask=mask,
            shape=out.shape,
        )
        self.linear.append(use)
        added = self._aliases.get(id(bias))
        if added is not None and _adds_outputs(rows, added, out):
            use.bias = added.site
        own = rows.rows if isinstance(rows, PartRows) else rows
        if bias is None and isinstance(own, ProductRows) and not own.left:
            self._open[id(out)] = (out, use, out._version)
        return use

    def _product(self, func: Callable[..., Any], out: Tensor, *args: Any, **kwargs: Any) -> LinearUse | None:
        """A product of a matrix and a weight, in either order; a product of two weights is no linear map."""
        named = (kwargs[name] for name in _OPERANDS if name in kwargs)
        *bias, first, second = (t for t in (*args, *named) if isinstance(t, Tensor))
        if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
            return None
        left, right = self._aliases.get(id(first)), self._aliases.get(id(second))
        weight = left or right
        if weight is None or (left and right):
            return None
        vector, x = weight.tensor.ndim == 1, second if left else first
        if not _fits(weight, x, out, left is not None):
            return None
        rows = ProductRows(tuple(out.shape), left=left is not None, stacked=weight.stacked, vector=vector)
        # x @ w: the map's m-by-n matrix is w^T; w @ x: it is w; a vector is its only row, or one of its rows.
        transposed = weight.is_column if vector else weight.transposed == (left is not None)
        return self._record(func, out, x, weight, bias[0] if bias else None, transposed, rows)

    def _linear(
        self, func: Callable[..., Any], out: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> LinearUse | None:
        alias = self._aliases.get(id(weight))
        if alias is None or id(input) in self._aliases or alias.stacked or _is_cut_vector(alias):
            return None
        vector = weight.ndim == 1
        rows = ProductRows(tuple(out.shape), left=False, stacked=False, vector=vector)
        return self._record(func, out, input, alias, bias, alias.is_column if vector else alias.transposed, rows)

    def _convolution(
        self,
        func: Callable[..., Any],
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> LinearUse | None:
        alias = self._aliases.get(id(weight))
        if alias is None or alias.transposed or alias.part or id(input) in self._aliases:
            return None
        rows = convolution_rows(out, weight, stride, padding, dilation, groups)
        return self._record(func, out, input, alias, bias, False, rows)

    def _transposed_convolution(
        self,
        func: Callable[..., Any],
        out: Tensor,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> LinearUse | None:
        """A bias is added to the outputs, of which each has several rows: it has a use of its own."""
        alias = self._aliases.get(id(weight))
        if alias is None or alias.transposed or alias.part or id(input) in self._aliases:
            return None
        rows = transposed_convolution_rows(input, weight, stride, padding, output_padding, groups, dilation)
        return None if rows is None else self._record(func, out, input, alias, None, True, rows)

    def _einsum(self, func: Callable[..., Any], out: Tensor, equation: Any, *operands: Any) -> LinearUse | None:
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        if not isinstance(equation, str) or len(operands) != 2:
            return None
        left, right = (self._aliases.get(id(tensor)) for tensor in operands)
        alias = left or right
        if alias is None or (left and right) or alias.transposed or alias.tensor.ndim != alias.ndim:
            return None
        x = operands[1] if left else operands[0]
        rows = einsum_rows(equation, x, alias.tensor, out, left=left is not None)
        if rows is None or (alias.part and rows.is_reshaped):
            return None
        return self._record(func, out, x, alias, None, rows.transposed, rows)

    def _grouped_product(
        self,
        func: Callable[..., Any],
        out: Tensor,
        x: Any = None,
        weight: Any = None,
        offs: Tensor | None = None,
        bias: Any = None,
        **_: Any,
    ) -> LinearUse | None:
        """Rows of the input in groups, each with a matrix of a stack of its own."""
        alias = self._aliases.get(id(weight))
        if alias is None or not alias.stacked or id(x) in self._aliases or bias is not None:
            return None
        if offs is None:
            return self._product(func, out, x, weight)
        rows = GroupedRows(tuple(offs.tolist()))
        return self._record(func, out, x, alias, None, not alias.transposed, rows)

    def _bias(self, total: Any, first: Any, second: Any, *, alpha: float = 1, **_: Any) -> LinearUse | None:
        """Join ``x @ w + b``: the sum of an open product and a site that holds one number for each output."""
        for product, bias in ((first, second), (second, first)):
            held, alias = self._open.get(id(product)), self._aliases.get(id(bias))
            if held is None or alias is None or alpha != 1:
                continue
            out, use, version = held
            # A product that was changed in place before the sum is another tensor; the sum itself may be in place.
            unchanged = version == out._version - (total is out)
            if unchanged and use.weight != alias.site and _adds_outputs(use.rows, alias, out):
                del self._open[id(product)]
                if total is not out:
                    self._joined[id(product)] = (out, use)
                use.bias = alias.site
                return use
        return None


_OPERANDS = ("input", "mat1", "batch1", "mat", "other", "mat2", "batch2", "vec")


def _fits(weight: Alias, x: Tensor, out: Tensor, left: bool) -> bool:
    """Whether a product is one whose rows can be told apart: no stack met by broadcasting, no stack of vectors."""
    if (left and x.ndim == 1 and out.ndim > 1) or _is_cut_vector(weight):
        return False
    if weight.ndim <= 2:
        return True
    return weight.stacked and out.ndim >= 3 and out.shape[-3] == weight.tensor.shape[-3] and x.ndim >= 2


def _is_cut_vector(weight: Alias) -> bool:
    """Whether it is a part of a weight that is a vector itself, and no matrix has it as a row."""
    return weight.part is not None and weight.value.ndim == 1


def _adds_outputs(rows: Rows, bias: Alias, out: Tensor) -> bool:
    """Whether a site, or a part of it, adds one number to each output of a map."""
    if isinstance(rows, PartRows):
        return adds_to_outputs(rows, bias)
    if bias.tensor.ndim > 1 or bias.part is not None:
        return False
    if not isinstance(rows, ProductRows):
        return isinstance(rows, ConvolutionRows)
    outputs = 1 if rows.vector else out.shape[-1]
    return not rows.left and not rows.stacked and bias.tensor.numel() == outputs


_WATCHED: ContextVar[bool] = ContextVar("nclbayes_watched", default=False)


def is_watched() -> bool:
    """Whether a :class:`MapRecorder` sees the present call.

    A module that can compute the same thing faster in a way that hides its linear maps may do so while this is false.

    Example:
        >>> from nclbayes.watch import MapRecorder, is_watched
        >>> with MapRecorder():
        ...     is_watched()
        True
        >>> is_watched()
        False
    """
    return _WATCHED.get()
