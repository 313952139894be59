"""Products with triangular matrices against plain ones."""

import pytest
import torch

from nclbayes.kronecker.triangular import between_triangles, upper_root


@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 7), (97, 200), (192, 96)])
@pytest.mark.parametrize(("samples", "stack"), [((), ()), ((3,), ()), ((3,), (2,)), ((), (2,))])
def test_a_product_between_triangles_is_the_plain_product(m, n, samples, stack):
    g = torch.Generator().manual_seed(0)
    left = torch.randn(*stack, m, m, generator=g, dtype=torch.float64).triu()
    right = torch.randn(*stack, n, n, generator=g, dtype=torch.float64).triu()
    matrix = torch.randn(*samples, *stack, m, n, generator=g, dtype=torch.float64)
    torch.testing.assert_close(between_triangles(left, matrix, right), left @ matrix @ right.mT)


@pytest.mark.parametrize("shape", [(1, 1), (6, 6), (3, 5, 5)])
def test_an_upper_root_has_the_same_square(shape):
    root = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upper = upper_root(root)
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper @ upper.mT, root @ root.mT)
