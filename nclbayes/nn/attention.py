"""torch's attention, its projections written as linear maps that the Fisher can see."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nclbayes.errors import DataError
from nclbayes.nn.showing import is_transformed, mask_of_steps
from nclbayes.watch import valid_steps
from nclbayes.watch.steps import current_mask


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose linear maps the Fisher can see.

    The same arguments, the same state dict, the same outputs. In self-attention, where query, key and value are the
    same tensor, the packed matrix `in_proj_weight` is one map; where they differ, its parts are maps of their own.
    Either way it makes one Kronecker block with its bias. The fused kernel that torch runs without gradients is not
    used.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> attention = ncl.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.zeros(5, 7, 8)
        >>> out, weights = attention(x, x, x)
        >>> out.shape, weights.shape
        (torch.Size([5, 7, 8]), torch.Size([5, 7, 7]))
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: [L, N, E], with batch first if so set, or [L, E].
            key: [S, N, kdim], likewise.
            value: [S, N, vdim], likewise.
            key_padding_mask: [N, S] or [S]; true where a key is left out, or numbers to add to its scores.
            need_weights: Whether to return the weights of the attention.
            attn_mask: [L, S] or [N * heads, L, S]; true where a query may not look, or numbers to add to the scores.
            average_attn_weights: Whether to average these weights over heads.
            is_causal: A hint that `attn_mask` is the causal mask.

        Returns:
            The outputs in the form of the query; and the weights, [N, L, S] or [N, heads, L, S], without N if there is
            no batch, or None.

        Raises:
            DataError: If the inputs do not fit, or `is_causal` is set without `attn_mask`.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            return super().forward(
                *(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            )
        if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise DataError(f"Query, key and value must have 3 dimensions, or 2 without a batch, not {shapes}.")
        if is_causal and attn_mask is None:
            raise DataError("is_causal is a hint about attn_mask: pass the causal mask as well.")
        batched = query.ndim == 3
        time_first = not batched or not self.batch_first
        itself = query is key and key is value
        if not batched:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if time_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        mask = self._scores_mask(key_padding_mask, attn_mask, query)
        # Without other masks or weights to return, the hint replaces the mask.
        hinted = is_causal and key_padding_mask is None and not need_weights
        steps = mask_of_steps(len(query), query.shape[1], time_first)
        with valid_steps(current_mask() if steps is None else steps):
            q, k, v = self._packed(query) if itself else self._separate(query, key, value)
            out, weights = self._attend(q, k, v, mask, need_weights, hinted)
            out = F.linear(out, self.out_proj.weight, self.out_proj.bias)
        out = out.transpose(0, 1) if time_first else out
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            out, weights = out.squeeze(1), None if weights is None else weights.squeeze(0)
        return out, weights

    def _packed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of one input, [N, L, E] each, by one map if they have one matrix."""
        if not self._qkv_same_embed_dim:
            return self._separate(x, x, x)
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        return q, k, v

    def _separate(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same of three inputs, by three maps."""
        if self._qkv_same_embed_dim:
            w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        else:
            w_q, w_k, w_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        b_q, b_k, b_v = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        steps = current_mask()
        # What is known of the query's steps says nothing of keys of another length.
        known = steps is None or steps.shape == key.shape[: steps.ndim]
        q = F.linear(query, w_q, b_q)
        with valid_steps(steps if known else None):
            return q, F.linear(key, w_k, b_k), F.linear(value, w_v, b_v)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of [N, L, E] to [N, S, E]: outputs [N, L, E], and weights [N, heads, L, S] if they are needed."""
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(len(v), -1, -1)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights or is_transformed():
            scores = q @ k.mT / math.sqrt(self.head_dim)
            scores = scores if mask is None else scores + mask
            weights = scores.softmax(-1) if need_weights else _softmax(scores)
            weights = F.dropout(weights, dropout) if dropout > 0 else weights
            out = weights @ v
        elif is_causal:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout)
        return out.transpose(1, 2).flatten(2), weights if need_weights else None

    def _scores_mask(self, padding: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor | None:
        """What is added to the scores, [N or 1, heads or 1, L or 1, S], with room for extra keys; None for nothing."""
        total = None
        if mask is not None:
            if mask.ndim == 3:
                total = _added(mask, query).unflatten(0, (-1, self.num_heads))
            else:
                total = _added(mask, query).reshape(1, 1, *mask.shape)
        if padding is not None:
            of_keys = _added(padding, query)[:, None, None, :]
            total = of_keys if total is None else total + of_keys
        extra = (self.bias_k is not None) + self.add_zero_attn
        return F.pad(total, (0, extra)) if total is not None and extra else total


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` without the fused kernel that it runs when no gradient is needed.

    Its attention is a :class:`~nclbayes.nn.MultiheadAttention`. The same arguments, the same state dict; the same
    outputs, but for those at padded steps: these are computed like others, whether a gradient is needed or not.

    Args:
        *args: As of torch's layer.
        **settings: As of torch's layer.

    Example:
        >>> import torch
        >>> import nclbayes as ncl
        >>> layer = ncl.nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
        >>> layer(torch.zeros(5, 7, 8)).shape
        torch.Size([5, 7, 8])
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.self_attn.__class__ = MultiheadAttention

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Self-attention, then a map with one hidden layer, each added to its input.

        Args:
            src: The sequences, [L, N, E], with batch first if so set, or [L, E].
            src_mask: The `attn_mask` of the attention.
            src_key_padding_mask: Its `key_padding_mask`.
            is_causal: A hint that `src_mask` is the causal mask.

        Returns:
            The form of `src`.
        """
        if src.is_nested:
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)

        def attended(x: Tensor) -> Tensor:
            out, _ = self.self_attn(
                *(x, x, x),
                key_padding_mask=src_key_padding_mask,
                need_weights=False,
                attn_mask=src_mask,
                is_causal=is_causal,
            )
            return self.dropout1(out)

        def mapped(x: Tensor) -> Tensor:
            return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        if self.norm_first:
            x = src + attended(self.norm1(src))
            return x + mapped(self.norm2(x))
        x = self.norm1(src + attended(src))
        return self.norm2(x + mapped(x))


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: minus infinity where it is true."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _softmax(scores: Tensor) -> Tensor:
    """Weights of the attention; zeros for a query that may look nowhere."""
    nowhere = scores.isneginf().all(-1, keepdim=True)
    return scores.masked_fill(nowhere, 0.0).softmax(-1).masked_fill(nowhere, 0.0)
