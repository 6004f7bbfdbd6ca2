"""A small net, and the names that a recording gives its calls."""

from __future__ import annotations

from torch import nn

from modtrace.ring import NameTable
from modtrace.track.naming.module_names import ModuleNames


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def fc(self, block: int) -> nn.Module:
        linear = self.h[block].fc
        assert isinstance(linear, nn.Module)
        return linear


class Names:
    """`ModuleNames`, asked by the modules that are open."""

    def __init__(self, model: nn.Module | str | None = None, strip_wrappers: bool = True) -> None:
        self.table = NameTable()
        self.forgotten: list[int] = []
        self.names = ModuleNames(self.table, model, self.forgotten.append, strip_wrappers=strip_wrappers)

    def number(self, *path: nn.Module) -> int:
        """Return the number of the last one, called inside those before it (outermost first)."""
        open_calls: list[tuple[nn.Module, int]] = []
        number = -1
        for module in path:
            number = self.names.resolve(module, open_calls)
            open_calls.insert(0, (module, number))
        return number

    def __call__(self, *path: nn.Module) -> tuple[str, str, str]:
        record = self.table.records[self.number(*path)]
        return record["label"], record["fqn"], record["class"]
