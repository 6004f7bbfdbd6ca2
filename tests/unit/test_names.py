"""Names of modules: where they begin, which path they take, wrappers, dead and shared modules."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from modtrace.ring import NameTable
from modtrace.ring.slot_format import NO_NAME
from modtrace.track.naming import module_names
from modtrace.track.naming.module_names import ModuleNames
from modtrace.track.naming.modules import MethodCall, ModuleRef
from tests.support.renamed_net import Block, Names, Net
from tests.support.small_modules import made_in_place_of


def test_names_begin_at_the_outermost_call() -> None:
    net = Net()
    names = Names()

    assert names(net) == ("Net", "Net", "Net")
    assert names(net, net.h[1]) == ("h.1: Block", "Net.h.1", "Block")
    assert names(net, net.h[1], net.fc(1)) == ("fc: Linear", "Net.h.1.fc", "Linear")


def test_a_label_is_the_path_below_the_nearest_open_call() -> None:
    net = Net()

    assert Names()(net, net.fc(0)) == ("h.0.fc: Linear", "Net.h.0.fc", "Linear")


def test_a_shared_module_has_the_name_of_the_path_by_which_it_is_called() -> None:
    net = Net()
    net.h[1].fc = net.fc(0)
    names = Names()

    assert names(net, net.h[0], net.fc(0))[1] == "Net.h.0.fc"
    assert names(net, net.h[1], net.fc(1))[1] == "Net.h.1.fc"
    # Called by their common parent, the first path counts.
    assert names(net, net.fc(0))[1] == "Net.h.0.fc"


def test_a_module_that_calls_itself_keeps_its_name() -> None:
    block = Block()

    assert Names()(block, block, block) == ("Block", "Block", "Block")
    assert Names()(block, block, block.fc) == ("fc: Linear", "Block.fc", "Linear")


def test_with_a_model_names_begin_there() -> None:
    net = Net()

    assert Names(net)(net.h[1]) == ("h.1: Block", "Net.h.1", "Block")
    assert Names(net)(net.h[1], net.fc(1)) == ("fc: Linear", "Net.h.1.fc", "Linear")
    assert Names(net)(net) == ("Net", "Net", "Net")
    assert Names(net)(Block()) == ("Block", "Block", "Block")
    # What calls it need not be part of it.
    assert Names(net)(nn.ReLU(), net.h[0]) == ("h.0: Block", "Net.h.0", "Block")


def test_with_the_name_of_a_class_names_begin_at_the_module_of_that_class_that_holds_the_called_one() -> None:
    net, other = Net(), Net()

    assert Names("Net")(net.h[1]) == ("h.1: Block", "Net.h.1", "Block")
    assert Names("Net")(other.h[0], other.fc(0)) == ("fc: Linear", "Net.h.0.fc", "Linear")
    assert Names("Net")(net) == ("Net", "Net", "Net")
    assert Names("Net")(Block()) == ("Block", "Block", "Block")
    assert Names("Absent")(net.h[1]) == ("Block", "Block", "Block")


def test_a_model_of_the_named_class_that_is_made_later_is_found() -> None:
    names = Names("Net")
    first = Net()
    assert names(first.h[0])[1] == "Net.h.0"
    second = Net()

    assert names(second.h[1])[1] == "Net#2.h.1"


def test_a_stranger_inside_a_call_is_a_root() -> None:
    assert Names()(Net(), nn.ReLU()) == ("ReLU", "ReLU", "ReLU")


def test_a_module_called_from_nowhere_has_the_name_that_it_had_last() -> None:
    net = Net()
    names = Names()
    names(net, net.h[1], net.fc(1))

    # So a recomputation inside backward keeps the name of the call that it repeats.
    assert names(net.fc(1))[1] == "Net.h.1.fc"
    assert names.names.last(net.fc(1)) == "Net.h.1.fc"
    assert names.names.last(net.h[0]) is None


def test_a_module_added_later_is_found() -> None:
    net = Net()
    names = Names()
    names(net, net.h[0])
    net.h.append(added := Block())

    assert names(net, added)[1] == "Net.h.2"


def test_a_dead_module_is_forgotten_and_its_names_are_known_still() -> None:
    net, names = Net(), Names()
    identity = id(net)
    number = names.number(net)
    alive = weakref.ref(net)

    del net
    gc.collect()

    assert alive() is None
    assert [ref.module_id for ref in names.names.dead] == [identity]
    names.names.forget_dead()
    assert names.names.dead == []
    assert names.forgotten == [identity]
    assert names.names.fqn(number) == "Net"


def test_modules_that_die_during_a_cleanup_are_removed_by_the_next() -> None:
    # As where a signal's handler or a finalizer calls modules, in the midst of it.
    forgotten: list[int] = []
    first, second = Block(), nn.Tanh()
    first_id, second_id = id(first), id(second)

    def forget(module_id: int) -> None:
        nonlocal second
        forgotten.append(module_id)
        if len(forgotten) == 1:
            del second
            assert names.resolve(third, []) == 2

    names = ModuleNames(NameTable(), None, forget, strip_wrappers=True)
    third = nn.ReLU()
    assert [names.resolve(module, []) for module in (first, second)] == [0, 1]
    del first

    names.forget_dead()

    # The first again, by the one that was called in the midst; that cannot tell how far the other one got.
    assert forgotten == [first_id, first_id, second_id]
    assert names.dead == []
    assert names.last(third) == "ReLU"


def test_two_threads_that_name_a_module_at_once_give_it_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names, net, other_thread = Names(), Net(), list[str]()
    assert names(net)[1] == "Net"

    def refer(*args: Any) -> ModuleRef:
        monkeypatch.setattr(module_names, "ModuleRef", ModuleRef)
        other_thread.append(names(net, net.h[0])[1])  # while this thread makes its reference
        return ModuleRef(*args)

    monkeypatch.setattr(module_names, "ModuleRef", refer)

    assert names(net, net.h[0])[1] == "Net.h.0"
    assert other_thread == ["Net.h.0"]


def test_a_module_with_the_id_of_a_dead_one_has_nothing_of_it() -> None:
    names = Names()
    dying: list[nn.Module] = [Block()]
    names(*dying)
    identity = id(dying[0])

    module = made_in_place_of(dying, nn.ReLU)

    assert names.names.last(module) is None
    assert names(module) == ("ReLU", "ReLU", "ReLU")
    del module
    assert [ref.module_id for ref in names.names.dead] == [identity]


def test_modules_without_names_are_removed_too() -> None:
    net, names = Net(), Names()
    call = MethodCall(net, "extra_repr")
    identity = id(call)
    assert names.number(net, call) == NO_NAME

    del call

    assert [ref.module_id for ref in names.names.dead] == [identity]


def test_names_keep_nothing_alive() -> None:
    net = Net()
    names = Names(net)
    names(net, net.h[0], net.fc(0))
    names(net.h[1])
    alive = [weakref.ref(module) for module in net.modules()]

    del net
    gc.collect()

    assert [ref() for ref in alive if ref() is not None] == []


def test_the_graph_that_stands_in_for_a_compiled_module_has_no_name() -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    compiled = torch.compile(nn.ReLU(), backend="eager")
    assert isinstance(compiled, nn.Module)

    assert Names().number(compiled, graph) == NO_NAME
    assert Names()(graph)[1] == type(graph).__name__


def test_equal_names_have_one_number() -> None:
    names = Names()

    for _ in range(100):
        net = Net()
        assert (names.number(net), names.number(net, net.fc(1))) == (0, 1)
        del net
    assert len(names.table.records) == 2


def test_a_module_in_a_wrapper_that_works_keeps_its_name() -> None:
    net = Net()
    wrapper = nn.DataParallel(net)
    names = Names()

    assert names(wrapper) == ("DataParallel", "DataParallel", "DataParallel")
    assert names(wrapper, net) == ("Net", "Net", "Net")
    assert names(wrapper, net, net.h[1]) == ("h.1: Block", "Net.h.1", "Block")
    assert names(wrapper, net.h[0]) == ("h.0: Block", "Net.h.0", "Block")


def test_a_wrapper_inside_a_model_has_a_name_around_that_of_what_it_wraps() -> None:
    net = Net()
    block = net.h[1]
    assert isinstance(block, Block)
    wrapper = net.h[1] = nn.DataParallel(block)
    names = Names()

    assert names(net, wrapper) == ("h.1: DataParallel", "DataParallel(Net.h.1)", "DataParallel")
    assert names(net, wrapper, block) == ("Block", "Net.h.1", "Block")
    assert names(net, wrapper, block, block.fc) == ("fc: Linear", "Net.h.1.fc", "Linear")


def test_a_wrapper_that_only_passes_on_is_shown_as_what_it_wraps() -> None:
    net = Net()
    block = net.h[1]
    assert isinstance(block, Block)
    wrapper = net.h[1] = checkpoint_wrapper(block)
    names = Names()

    number = names.number(net, wrapper)
    assert names(net, wrapper) == ("h.1: Block", "Net.h.1", "Block")
    assert names.number(net, wrapper, block) == NO_NAME
    assert names(net, wrapper, block.fc) == ("fc: Linear", "Net.h.1.fc", "Linear")
    # Recomputed without its wrapper.
    assert names.number(block) == number


def test_a_part_that_is_wrapped_after_the_first_call_is_named_as_one_that_was_before() -> None:
    net = Net()
    names = Names()
    assert names(net, net.h[0])[1] == "Net.h.0"
    block = net.h[1]
    assert isinstance(block, Block)
    assert names(net, block, block.fc)[1] == "Net.h.1.fc"

    wrapper = net.h[1] = nn.DataParallel(block)

    assert names(net, wrapper) == ("h.1: DataParallel", "DataParallel(Net.h.1)", "DataParallel")
    assert names(net, wrapper, block) == ("Block", "Net.h.1", "Block")
    assert names(net, wrapper, block, block.fc) == ("fc: Linear", "Net.h.1.fc", "Linear")


def test_a_class_without_a_name_and_a_part_without_one() -> None:
    nameless, part = type("", (nn.Module,), {})(), nn.ReLU()
    nameless._modules[""] = part
    nameless._modules["é"] = other = nn.Identity()
    names = Names()

    assert names(nameless) == ("", "", "")
    assert names(nameless, part) == ("ReLU", "ReLU", "ReLU")
    assert names(nameless, other) == ("é: Identity", "é", "Identity")


class Passes(nn.Module):
    """Holds a module as `module`, and nothing says that it is a wrapper."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x)
        return result


class Engine(Passes):
    """A wrapper with parts beside the model, like DeepSpeed's engines."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.loss_model = nn.MSELoss()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["module"], name)


class GradientSamples(nn.Module):
    """A wrapper like opacus' GradSampleModule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._module = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_module"], name)


class PipelineEngine(Engine):
    pass


class Settings(nn.Module):
    """Has attributes of its own making, and is no wrapper."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner

    def __getattr__(self, name: str) -> Any:
        return 1 if name == "width" else super().__getattr__(name)


@pytest.mark.parametrize("kind", [Engine, PipelineEngine, GradientSamples])
def test_a_module_that_forwards_attributes_to_an_inner_one_wraps_it(kind: type[nn.Module]) -> None:
    net = Net()
    wrapper = kind(net)
    names = Names()

    assert names(wrapper) == (kind.__name__, kind.__name__, kind.__name__)
    assert names(wrapper, net) == ("Net", "Net", "Net")
    assert names(wrapper, net, net.h[1]) == ("h.1: Block", "Net.h.1", "Block")
    assert Names(strip_wrappers=False)(wrapper, net)[1] in {f"{kind.__name__}.module", f"{kind.__name__}._module"}


def test_other_modules_of_a_wrapper_are_named_without_the_wrapper() -> None:
    engine = Engine(Net())

    assert Names()(engine, engine.loss_model)[1] == "Net.loss_model"


@pytest.mark.parametrize(("kind", "path"), [(Passes, "Passes.module"), (Settings, "Settings.net")])
def test_a_part_of_that_name_or_attributes_of_its_own_make_no_wrapper(kind: type[nn.Module], path: str) -> None:
    outer = kind(nn.Linear(1, 1))

    assert Names()(outer, next(outer.children()))[1] == path


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_a_scripted_module_is_no_wrapper() -> None:
    scripted: Any = torch.jit.script(Passes(nn.Linear(1, 1)))

    assert Names()(scripted, scripted.module)[1] == "RecursiveScriptModule.module"


def test_wrappers_around_each_other_are_left_out_together() -> None:
    net = Net()
    around = nn.DataParallel(checkpoint_wrapper(net))
    names = Names()

    assert names(around, around.module)[1] == "Net"
    assert names(around, net.h[0])[1] == "Net.h.0"


def test_wrappers_stay_in_names_where_they_are_to() -> None:
    net = Net()
    wrapper = nn.DataParallel(net)
    names = Names(strip_wrappers=False)

    assert names(wrapper, net) == ("module: Net", "DataParallel.module", "Net")
    assert names(wrapper, net, net.h[1])[1] == "DataParallel.module.h.1"


def test_a_name_is_three_objects_at_most_for_the_garbage_collector_to_count() -> None:
    # It runs after so many new ones, and a full run takes longer than all else that a recording adds to a first step.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(100)))
    modules = list(model.modules())
    resolve = Names().names.resolve
    gc.collect()
    before = gc.get_count()[0]
    around = [(model, resolve(model, []))]
    for module in modules[1:]:
        resolve(module, around)
    count = gc.get_count()[0] - before

    assert count <= 3 * len(modules)


def test_with_a_model_names_begin_there_inside_other_calls() -> None:
    net, head = Net(), nn.Linear(2, 2)
    around = nn.ModuleDict({"inner": nn.ModuleList([net]), "head": head})
    for model in (net, "Net"):
        names = Names(model)

        assert names(around) == ("ModuleDict", "ModuleDict", "ModuleDict")
        assert names(around, net) == ("Net", "Net", "Net")
        assert names(around, net, net.h[1]) == ("h.1: Block", "Net.h.1", "Block")
        assert names(around, net.h[0]) == ("h.0: Block", "Net.h.0", "Block")
        assert names(around, net.h[0], net.fc(0)) == ("fc: Linear", "Net.h.0.fc", "Linear")
        assert names(around, head, net.fc(1)) == ("h.1.fc: Linear", "Net.h.1.fc", "Linear")
        # What is not inside keeps its name.
        assert names(around, head) == ("head: Linear", "ModuleDict.head", "Linear")
        assert names(around, net, head) == ("head: Linear", "ModuleDict.head", "Linear")
        assert names.names.unmatched_model() is None


def test_with_the_name_of_a_class_each_module_of_it_is_a_beginning_but_those_inside_another_one() -> None:
    first, second = Net(), Net()
    around = nn.ModuleList([first, second])
    tanh = nn.Tanh()
    inner = nn.Sequential(tanh)
    outer = nn.Sequential(inner)

    assert Names("Net")(around, first)[1] == "Net"
    names = Names("Net")
    assert [names(around, net, net.h[0])[1] for net in (first, second)] == ["Net.h.0", "Net#2.h.0"]
    assert Names("Sequential")(outer, inner, tanh)[1] == "Sequential.0.0"


def test_a_wrapped_model_is_a_beginning() -> None:
    net = Net()
    compiled = torch.compile(net, backend="eager")
    assert isinstance(compiled, nn.Module)
    around = nn.ModuleList([compiled, nn.DataParallel(net)])
    for model in (net, "Net"):
        names = Names(model)

        assert names(around, compiled)[1] == "Net"
        assert names(around, compiled, net.h[0])[1] == "Net.h.0"
        assert names(around, around[1], net) == ("Net", "Net", "Net")
        assert names(around, around[1], net, net.h[1])[1] == "Net.h.1"


def test_a_model_at_which_no_names_began_is_told() -> None:
    for model in ("Absent", "Net", Net()):
        names = Names(model)
        names(nn.ReLU())
        assert names.names.unmatched_model() == (model if isinstance(model, str) else "Net")
    assert Names().names.unmatched_model() is None


def test_modules_that_are_alive_at_once_are_told_apart_and_what_stands_for_another_one_is_not() -> None:
    one, two = Net(), Net()
    names = Names()
    assert names(one) == ("Net", "Net", "Net")
    assert names(two) == ("Net#2", "Net#2", "Net")
    assert names(two, two.h[0]) == ("h.0: Block", "Net#2.h.0", "Block")

    replica = one._replicate_for_data_parallel()
    compiled = torch.compile(two, backend="eager")
    assert isinstance(compiled, nn.Module)

    assert names(replica) == ("Net", "Net", "Net")
    assert names(checkpoint_wrapper(one)) == ("Net", "Net", "Net")
    assert names(compiled) == ("Net#2", "Net#2", "Net")
    assert names(one) == ("Net", "Net", "Net")
    assert names(two) == ("Net#2", "Net#2", "Net")


def test_wrappers_that_work_are_told_apart_and_what_they_wrap_too() -> None:
    one, two = nn.DataParallel(Net()), nn.DataParallel(Net())
    names = Names()

    assert [names(wrapper) for wrapper in (one, two)] == [
        ("DataParallel", "DataParallel", "DataParallel"),
        ("DataParallel#2", "DataParallel#2", "DataParallel"),
    ]
    assert [names(wrapper, wrapper.module)[1] for wrapper in (one, two)] == ["Net", "Net#2"]
    assert names(two, two.module, two.module.h[1])[1] == "Net#2.h.1"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_a_scripted_module_has_the_class_that_torch_gives_it() -> None:
    scripted = [torch.jit.script(nn.Sequential(nn.Linear(2, 2))) for _ in range(2)]
    names = Names()

    assert [names(net)[1] for net in scripted] == ["RecursiveScriptModule", "RecursiveScriptModule#2"]


def test_a_part_that_takes_the_place_of_another_one_has_a_name_of_its_own_while_that_is_alive() -> None:
    net, names = Net(), Names()
    old = net.fc(0)
    assert names(net, old)[1] == "Net.h.0.fc"
    net.h[0].fc = nn.Linear(2, 2)

    assert names(net, net.fc(0)) == ("h.0.fc#2: Linear", "Net.h.0.fc#2", "Linear")
    net.h[0].fc = old
    assert names(net, old)[1] == "Net.h.0.fc"
    del old
    net.h[0].fc = nn.Linear(2, 2)
    assert names(net, net.fc(0))[1] == "Net.h.0.fc"
