"""Whether tensors from outside can be the parts of a block's Gaussian."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nclbayes.blocks import Block, KroneckerBlock
from nclbayes.errors import MatrixError
from nclbayes.gaussians.kronecker import TRIANGLE
from nclbayes.gaussians.state import Structure
from nclbayes.kronecker.blockdiagonal import stacks_of
from nclbayes.kronecker.precision import check_symmetric, kronecker_logdet
from nclbayes.storage import Form, Misfit

_WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_EPS = torch.finfo(torch.float64).eps
# How many times larger than its estimate a rounding error may be.
_SLACK = 100.0
# Below this condition number every root comes from a Cholesky factor.
_CHOLESKY = 1e7


def check_forms(name: str, forms: Mapping[str, Form], structure: Structure, block: Block) -> None:
    """Refuse parts that do not have the shapes and dtypes of a block's Gaussian.

    Args:
        name: The block's name.
        forms: By part.
        structure: The form of the Gaussian.
        block: The block.

    Raises:
        Misfit: If one is missing, too many, or of another form.
    """
    shapes = _shapes(structure, block)
    if "logdet" in shapes and any(part.endswith(f"/{TRIANGLE}") for part in forms):
        shapes = _folded(shapes, with_roots="logdet" in forms)
    for part in sorted(set(shapes) | set(forms)):
        if part not in forms or part not in shapes:
            raise Misfit(f"the tensor '{name}/{part}' is {'missing' if part in shapes else 'no part of a Gaussian'}")
        form, dtypes = forms[part], _WEIGHTS if part == "loc" else (torch.float64,)
        if form.shape != shapes[part] or form.dtype not in dtypes:
            raise Misfit(
                f"the tensor '{name}/{part}' is {form.shape}, {form.dtype}; it should be {shapes[part]}, "
                f"{' or '.join(map(str, dtypes))}"
            )


def check_parts(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that are not those of one Gaussian: means, precisions, and what belongs to these.

    Args:
        name: The block's name.
        tensors: By part, from :meth:`State.tensors`.

    Raises:
        Misfit: If they are not finite, not positive definite, or do not belong together to rounding.
    """
    for part, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise Misfit(f"the tensor '{name}/{part}' has NaN or infinite entries")
    if "precision" in tensors:
        if not bool((tensors["precision"] > 0).all()):
            raise Misfit(f"the tensor '{name}/precision' has entries that are not positive")
        return
    if "logdet" not in tensors:
        return  # Factors alone: whether they are positive definite, their factorisation says.
    logs, tolerance = [], tensors["logdet"].new_tensor(_SLACK * _EPS)
    for side in ("input", "output"):
        found = []
        for stack in _stacks(side, tensors):
            matrix, inverse, root = (tensors[f"{side}{part}{stack}"] for part in ("", "_inverse", "_root"))
            close = _check_factor(f"{name}/{side}{stack}", matrix, inverse, root)
            tolerance = torch.maximum(tolerance, close.amax(-1) if stack else close)
            found.append(_logs(root, bool(stack)))
        logs.append(torch.cat(found, dim=-1))
    (A, G), (n, m) = logs, (logs[0].shape[-1], logs[1].shape[-1])
    logdet = -2 * kronecker_logdet(A.sum(-1), G.sum(-1), n, m)
    size = n * m + kronecker_logdet(A.abs().sum(-1), G.abs().sum(-1), n, m)
    if bool(((tensors["logdet"] - logdet).abs() > tolerance * size).any()):
        raise Misfit(f"the tensor '{name}/logdet' is not the log determinant of the factors")


def check_definite(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse factors that are positive definite only up to rounding: numbers lie too far apart to go on from there.

    Args:
        name: The block's name.
        tensors: By part, from :meth:`State.tensors`, and checked to belong together.

    Raises:
        Misfit: If one is.
    """
    for part in [f"{side}{stack}" for side in ("input", "output") for stack in _stacks(side, tensors)]:
        if part in tensors and bool(torch.linalg.cholesky_ex(tensors[part]).info.any()):
            raise Misfit(f"the tensor '{name}/{part}' is not positive definite")


def _stacks(side: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """How the names of the stacks of a factor's blocks end; of a whole one, with nothing."""
    return sorted(part.removeprefix(side) for part in tensors if part.startswith(f"{side}.")) or [""]


def _logs(root: Tensor, is_stack: bool) -> Tensor:
    """The logarithms of a root's diagonal, [..., k]."""
    found = root.diagonal(dim1=-2, dim2=-1).abs().log()
    return found.flatten(-2) if is_stack else found


def _check_factor(name: str, A: Tensor, inverse: Tensor, S: Tensor) -> Tensor:
    """A = A^T > 0, S upper triangular, S S^T = A^-1 and S^-T S^-1 = A, [..., k, k] each; returns how closely, [...]."""
    for what, matrix in ((name, A), (f"{name}_inverse", inverse)):
        try:
            check_symmetric(f"the tensor '{what}'", matrix)
        except MatrixError as error:
            raise Misfit(str(error).rstrip(".")) from error
        if not bool((matrix.diagonal(dim1=-2, dim2=-1) > 0).all()):
            raise Misfit(f"the tensor '{what}' is not positive definite: its diagonal is not positive")
    if bool(S.tril(-1).any()) or not bool((S.diagonal(dim1=-2, dim2=-1) != 0).all()):
        raise Misfit(f"the tensor '{name}_root' is not upper triangular, or is singular")
    k = A.shape[-1]
    shifted = A.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(_SLACK * k * _EPS * A.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True))
    if bool(torch.linalg.cholesky_ex(shifted).info.any()):
        raise Misfit(f"the tensor '{name}' is not positive definite")
    # Products with random vectors tell two matrices apart, at a k-th of the cost of the matrices' own product.
    v = torch.randn(k, 8, generator=torch.Generator().manual_seed(0), dtype=A.dtype, device="cpu").to(A.device)
    gap = _norm(inverse @ v - S @ (S.mT @ v)) / _norm(v)
    if bool((gap > _SLACK * k * _EPS * S.square().sum((-2, -1))).any()):
        raise Misfit(f"the tensors '{name}_root' and '{name}_inverse' do not belong together")
    back = torch.linalg.solve_triangular(S, v.expand(*S.shape[:-2], k, 8), upper=True)
    back = torch.linalg.solve_triangular(S.mT, back, upper=False)
    gap, tolerance = _norm(A @ v - back) / _norm(v), _tolerance(A, inverse)
    if bool((gap > tolerance * _norm(A)).any()):
        raise Misfit(f"the tensor '{name}_inverse' is not the inverse of '{name}'")
    return tolerance


def _tolerance(A: Tensor, inverse: Tensor) -> Tensor:
    """How far S^-T S^-1 may miss A, relative to A, by rounding alone, [...].

    A root that a Cholesky factor was inverted to misses by about k eps times the root of the condition number. Above a
    condition number of some 1e7 a sum's root may be that of its pencil, which has the rounding errors of whitening by
    the precision before: up to a hundredth where prior and Fisher lie twenty decades apart.
    """
    condition = _norm(A) * _norm(inverse)
    close = _SLACK * A.shape[-1] * _EPS * (1 + condition.sqrt())
    return torch.where(condition < _CHOLESKY, close, close.clamp(min=1e-2))


def _folded(shapes: Mapping[str, tuple[int, ...]], *, with_roots: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of what a file has of the parts: triangles of the factors, and of their roots if they are there."""
    kept = ("input", "output", *(("input_root", "output_root") if with_roots else ()))
    found = {part: shapes[part] for part in (("loc", "logdet") if with_roots else ("loc",))}
    for part, shape in shapes.items():
        if part.partition(".")[0] in kept:
            found[f"{part}/{TRIANGLE}"] = (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)
    return found


def _norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix)


def _shapes(structure: Structure, block: Block) -> dict[str, tuple[int, ...]]:
    """The shapes of the parts of a Gaussian."""
    if structure is Structure.DIAGONAL or not isinstance(block, KroneckerBlock):
        return {"loc": block.shape, "precision": block.shape}
    *stack, m, n = block.shape
    found = {"loc": block.shape, "logdet": tuple(stack)}
    for side, size, most in (("input", n, block.widths[0]), ("output", m, block.widths[1])):
        shapes = {"": (*stack, size, size)}
        if most:
            counts = stacks_of(size, most)
            shapes = {f".{i}": (*stack, count, width, width) for i, (count, width) in enumerate(counts)}
        found |= {f"{side}{p}{i}": shape for p in ("", "_inverse", "_root") for i, shape in shapes.items()}
    return found
