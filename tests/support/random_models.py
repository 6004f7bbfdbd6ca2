"""Models of any shape: trees of modules that hypothesis draws, and what a recording of one must show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

__all__ = ["Spec", "Tree", "called", "specs", "with_gradient"]


class Spec(NamedTuple):
    """One module of a tree.

    Attributes:
        weighted: it multiplies by a parameter of its own, before its children.
        frozen: it runs under no_grad, and so makes no nodes.
        residual: its input is added to what its children make of it.
        keyword: it is called by keyword.
        output: it returns a "tensor", a "tuple" or a "dict".
        children: the modules in it, each with how often it is called in a row.
    """

    weighted: bool
    frozen: bool
    residual: bool
    keyword: bool
    output: str
    children: tuple[tuple[Spec, int], ...]


def _spec(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    # A module in twenty is frozen: what is in it makes no nodes either.
    return st.builds(
        Spec,
        weighted=st.booleans(),
        frozen=st.integers(0, 19).map(lambda number: number == 7),
        residual=st.booleans(),
        keyword=st.booleans(),
        output=st.sampled_from(["tensor", "tuple", "dict"]),
        children=children,
    )


def specs() -> st.SearchStrategy[Spec]:
    """Trees of up to about twenty modules."""
    return st.recursive(
        _spec(st.just(())),
        lambda inner: _spec(st.lists(st.tuples(inner, st.integers(1, 2)), max_size=4).map(tuple)),
        max_leaves=12,
    )


class Tree(nn.Module):
    """The model of a spec; maps float[n] to float[n]."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        if spec.weighted:
            self.weight = nn.Parameter(torch.tensor(0.9))
        self.inner = nn.ModuleList(Tree(child) for child, _ in spec.children)

    def forward(self, x: Tensor) -> Any:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.spec.frozen):
            out = x * self.weight if self.spec.weighted else x
            for child, (spec, times) in zip(self.inner, self.spec.children, strict=True):
                for _ in range(times):
                    out = _tensor(child(x=out) if spec.keyword else child(out))
            out = out + x if self.spec.residual else out
        return {"tensor": out, "tuple": (out, None), "dict": {"out": out}}[self.spec.output]

    def loss(self) -> Tensor:
        """Run it once; a gradient flows whatever is frozen."""
        x = torch.ones(3, requires_grad=True)
        return _tensor(self(x=x)).sum() + x.sum()


def _tensor(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value["out"] if isinstance(value, dict) else value[0]
    return value


def called(spec: Spec, fqn: str = "Tree", depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield name and depth of each call of one forward, in order."""
    yield fqn, depth
    for number, (child, times) in enumerate(spec.children):
        for _ in range(times):
            yield from called(child, f"{fqn}.inner.{number}", depth + 1)


def with_gradient(model: Tree) -> set[str]:
    """Return the names of the modules whose own parameter has a gradient."""
    names = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {f"Tree.{name}".removesuffix(".weight") for name in names}
