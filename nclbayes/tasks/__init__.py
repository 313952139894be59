"""Task sets: functions that return tasks to learn one after the other."""

from nclbayes.tasks.cifar import split_cifar10, split_cifar100
from nclbayes.tasks.digits import split_digits
from nclbayes.tasks.mnist import permuted_mnist, rotated_mnist, split_fashion_mnist, split_mnist
from nclbayes.tasks.stimulus_response import stimulus_response
from nclbayes.tasks.stroke_mnist import stroke_mnist
from nclbayes.tasks.toy import toy_convex, toy_nonconvex

__all__ = [
    "permuted_mnist",
    "rotated_mnist",
    "split_cifar10",
    "split_cifar100",
    "split_digits",
    "split_fashion_mnist",
    "split_mnist",
    "stimulus_response",
    "stroke_mnist",
    "toy_convex",
    "toy_nonconvex",
]
