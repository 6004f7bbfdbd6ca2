"""`ModuleTracker` and `ModTracker` while modules run: parents, hooks, threads, exceptions, recompute."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import modtrace
from modtrace import ModTracker, ModuleTracker
from tests.support.small_modules import made_in_place_of

Tracker = ModuleTracker | ModTracker


class Look(nn.Module):
    """Doubles its input; notes `see()` in forward, and in backward once the gradient of its output is known."""

    def __init__(self, see: Callable[[], Any]) -> None:
        super().__init__()
        self.see = see
        self.forward_saw: list[Any] = []
        self.backward_saw: list[Any] = []
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.forward_saw.append(self.see())
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(lambda _: self.backward_saw.append(self.see()))
        return y.exp()


@pytest.fixture(params=[ModuleTracker, ModTracker])
def tracker(request: pytest.FixtureRequest) -> Tracker:
    made: Tracker = request.param()
    return made


def test_a_module_without_gradient_inputs_is_closed(tracker: Tracker) -> None:
    model = nn.Sequential(nn.Embedding(3, 2), Look(lambda: tracker.parents), nn.Embedding(2, 2))
    first, look = model[0], model[1]
    assert isinstance(look, Look)
    seen = []

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.look = first, look

        def forward(self, tokens: Tensor) -> Tensor:
            embedded = self.first(tokens)
            embedded.register_hook(lambda _: seen.append(tracker.parents))
            return self.look(embedded)  # type: ignore[no-any-return]

    with tracker:
        Net()(torch.tensor([0, 1])).sum().backward()
    assert look.forward_saw == [{"Global", "Net", "Net.look"}]
    assert look.backward_saw == [{"Global", "Net", "Net.look"}]
    # The hook on the embedding's output runs when its node is reached.
    assert seen == [{"Global", "Net", "Net.first"}]
    assert tracker.parents == {"Global"}


def test_keyword_inputs(tracker: Tracker) -> None:
    class Inner(Look):
        def forward(self, *, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Inner(lambda: tracker.parents), Inner(lambda: tracker.parents)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(x=self.a(x=x))  # type: ignore[no-any-return]

    net = Net()
    with tracker:
        net(torch.ones(2, requires_grad=True)).sum().backward()
    assert net.b.backward_saw == [{"Global", "Net", "Net.b"}]
    assert net.a.backward_saw == [{"Global", "Net", "Net.a"}]


def test_a_persistent_input_gathers_nothing() -> None:
    seen = []
    tracker = ModTracker()
    tracker.register_user_hooks(post_bw_hook=lambda _, gradients: seen.append(gradients))
    model = nn.Linear(2, 2)
    x = torch.ones(2, requires_grad=True)
    with tracker:
        for _ in range(100):
            model(x).sum().backward()
    assert len(seen) == 100
    hooks = x._backward_hooks
    assert hooks is not None
    assert len(hooks) == 1
    (hook,) = hooks.values()
    assert len(hook._waiting_calls) <= 16  # type: ignore[attr-defined]


def test_the_other_tracker_leaves_nothing_on_inputs() -> None:
    x = torch.ones(2, requires_grad=True)
    with ModuleTracker():
        nn.Linear(2, 2)(x).sum().backward()
    assert not x._backward_hooks


def test_two_threads_see_their_own_calls(tracker: Tracker) -> None:
    inside = threading.Barrier(2)

    def see() -> Any:
        inside.wait(30)
        parents = tracker.parents
        inside.wait(30)
        return parents

    class A(Look):
        pass

    class B(Look):
        pass

    a, b = A(see), B(see)
    with tracker:
        other = threading.Thread(target=lambda: b(torch.ones(2)).sum().backward())
        other.start()
        a(torch.ones(2)).sum().backward()
        other.join()
    assert a.forward_saw == a.backward_saw == [{"Global", "A"}]
    assert b.forward_saw == b.backward_saw == [{"Global", "B"}]


def test_backward_on_another_thread(tracker: Tracker) -> None:
    model = Look(lambda: (tracker.parents, tracker.is_bw))
    with tracker:
        loss = model(torch.ones(2)).sum()
        other = threading.Thread(target=loss.backward)
        other.start()
        other.join()
        assert not tracker.is_bw
    assert model.backward_saw == [({"Global", "Look"}, True)]


def test_trackers_work_during_a_recording_and_together(tracker: Tracker) -> None:
    call = nn.Module.__call__
    second = ModuleTracker()
    model = nn.Sequential(Look(lambda: (tracker.parents, second.parents)))
    with tracker, modtrace.record(engine="python") as recording, second:
        model(torch.ones(2)).sum().backward()
        assert [stack.calls for stack in recording.where()] == [()]
    assert nn.Module.__call__ is call
    both = {"Global", "Sequential", "Sequential.0"}
    assert model[0].forward_saw == model[0].backward_saw == [(both, both)]
    spans = [(span.fqn, span.phase) for span in recording.timeline().spans]
    assert spans == [
        ("Sequential", "forward"),
        ("Sequential.0", "forward"),
        ("Sequential", "backward"),
        ("Sequential.0", "backward"),
    ]


def test_a_tracker_can_be_entered_again(tracker: Tracker) -> None:
    call = nn.Module.__call__
    model = Look(lambda: tracker.parents)
    with tracker as outer, tracker as inner:
        assert outer is inner is tracker
        model(torch.ones(2))
    assert nn.Module.__call__ is call
    with tracker:
        with tracker:
            pass
        model(torch.ones(2))
    model(torch.ones(2))
    assert nn.Module.__call__ is call
    assert model.forward_saw == [{"Global", "Look"}, {"Global", "Look"}, {"Global"}]


def test_only_mod_tracker_follows_a_graph_after_the_block() -> None:
    for tracker, open_names in ((ModuleTracker(), {"Global"}), (ModTracker(), {"Global", "Look"})):
        model = Look(lambda tracker=tracker: tracker.parents)  # type: ignore[misc]
        with tracker:
            loss = model(torch.ones(2)).sum()
        loss.backward()
        assert model.backward_saw == [open_names]
        assert tracker.parents == {"Global"}


def test_an_exception_in_forward_closes_the_modules_it_leaves(tracker: Tracker) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.look = Fails(), Look(lambda: tracker.parents)

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(ValueError, match="no"):
                self.fails(x)
            return self.look(x)  # type: ignore[no-any-return]

    net = Net()
    with tracker:
        net(torch.ones(2)).sum().backward()
    assert net.look.forward_saw == net.look.backward_saw == [{"Global", "Net", "Net.look"}]


def test_an_exception_in_backward_is_forgotten(tracker: Tracker) -> None:
    failing, model = Look(lambda: None), Look(lambda: tracker.parents)

    def fail(_: Tensor) -> None:
        raise ValueError("no")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = failing

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            y.register_hook(fail)
            return y.exp()  # type: ignore[no-any-return]

    with tracker:
        loss = Outer()(torch.ones(2)).sum()
        with pytest.raises(ValueError, match="no"):
            loss.backward()
        assert tracker.parents == {"Global"}
        model(torch.ones(2)).sum().backward()
    assert model.backward_saw == [{"Global", "Look"}]


def test_a_module_with_two_parents_has_the_name_of_the_caller(tracker: Tracker) -> None:
    shared = Look(lambda: tracker.parents)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = shared

        def forward(self, x: Tensor) -> Tensor:
            return self.held(x)  # type: ignore[no-any-return]

    model = nn.Sequential(Holder(), Holder())
    with tracker:
        model(torch.ones(2)).sum().backward()
    first = {"Global", "Sequential", "Sequential.0", "Sequential.0.held"}
    second = {"Global", "Sequential", "Sequential.1", "Sequential.1.held"}
    assert shared.forward_saw == [first, second]
    assert shared.backward_saw == [second, first]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute(tracker: Tracker, reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look = Look(lambda: (tracker.parents, tracker.is_bw))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.look, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    net = Net()
    with tracker:
        net(torch.ones(2, requires_grad=True)).sum().backward()
    names = {"Global", "Net", "Net.look"}
    assert net.look.forward_saw == [(names, False), (names, True)]
    assert net.look.backward_saw == [(names, True)]


def test_backward_inside_a_forward(tracker: Tracker) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look = Look(lambda: (tracker.parents, tracker.is_bw))

        def forward(self, x: Tensor) -> Tensor:
            self.look(x).sum().backward()
            assert tracker.parents == {"Global", "Net"}
            assert not tracker.is_bw
            return x

    net = Net()
    with tracker:
        net(torch.ones(2))
    assert net.look.backward_saw == [({"Global", "Net", "Net.look"}, True)]


class Held:
    """A hook: it lives as long as the graph."""

    def __call__(self, _: Tensor) -> None:
        pass


def test_trackers_keep_no_module_or_graph_alive(tracker: Tracker) -> None:
    if isinstance(tracker, ModTracker):
        tracker.register_user_hooks(post_bw_hook=lambda *_: None, pre_bw_hook=lambda *_: None)
    with tracker:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        x = torch.ones(2, requires_grad=True)
        y = model(x)
        hook = Held()
        y.register_hook(hook)
        module, graph = weakref.ref(model[0]), weakref.ref(hook)
        del hook
        # The graph is alive, the modules are not.
        del model
        assert module() is None
        y.sum().backward()
        del y
        assert graph() is None


def test_under_torch_compile(tracker: Tracker) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with tracker:
        compiled(torch.ones(2)).sum().backward()
        assert tracker.parents == {"Global"}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Heard:
    """Registers hooks that note their arguments."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str | None]] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.tracker = ModTracker()
        self.tracker.register_user_hooks(
            *(self.hook(kind) for kind in ("pre_fw", "post_fw", "pre_bw", "post_bw")),
        )

    def hook(self, kind: str) -> Callable[..., None]:
        def note(module: nn.Module | None, *arguments: Any) -> None:
            fqn = None if module is None else self.tracker.get_known_fqn(module)
            assert module is None or fqn in self.tracker.parents
            self.events.append((kind, fqn))
            self.arguments.append(arguments)

        return note


def test_hooks_nest_and_get_inputs_and_outputs() -> None:
    heard = Heard()
    model = nn.Sequential(Look(lambda: None), Look(lambda: None))
    x = torch.ones(2, requires_grad=True)
    with heard.tracker:
        output = model(x)
        output.backward(torch.ones(2))
    assert heard.events == [
        ("pre_fw", "Sequential"),
        ("pre_fw", "Sequential.0"),
        ("post_fw", "Sequential.0"),
        ("pre_fw", "Sequential.1"),
        ("post_fw", "Sequential.1"),
        ("post_fw", "Sequential"),
        ("pre_bw", "Sequential"),
        ("pre_bw", "Sequential.1"),
        ("post_bw", "Sequential.1"),
        ("pre_bw", "Sequential.0"),
        # Both wait for the gradient of the same tensor; the hook of the module called first runs first.
        ("post_bw", "Sequential"),
        ("post_bw", "Sequential.0"),
    ]
    e = torch.ones(2).exp()
    middle, first = e.exp() * 1, e.exp() * e
    pre_fw, post_fw = heard.arguments[1], heard.arguments[2]
    assert pre_fw == ((x,),)
    assert post_fw[0] == (x,)
    torch.testing.assert_close(post_fw[1], e)
    for position, expected in ((6, torch.ones(2)), (7, torch.ones(2)), (9, middle)):
        ((gradient,),) = heard.arguments[position]
        torch.testing.assert_close(gradient, expected)
    for position, expected in ((8, middle), (10, first), (11, first)):
        (((gradient,),),) = heard.arguments[position]
        torch.testing.assert_close(gradient, expected)


def test_siblings_that_share_an_input_end_one_by_one() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(2, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x) * self.v(x)  # type: ignore[no-any-return]

    heard = Heard()
    model = Attention()
    with heard.tracker:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert heard.events[8:] == [
        ("pre_bw", "Attention"),
        ("pre_bw", "Attention.v"),
        ("post_bw", "Attention.v"),
        ("pre_bw", "Attention.k"),
        ("post_bw", "Attention.k"),
        ("pre_bw", "Attention.q"),
        # Only now is the sum of the three gradients known.
        ("post_bw", "Attention"),
        ("post_bw", "Attention.q"),
    ]


def test_hooks_see_an_exception_in_forward() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    heard = Heard()
    x = torch.ones(2)
    with heard.tracker, pytest.raises(ValueError, match="no"):
        Fails()(x)
    assert heard.events == [("pre_fw", "Fails"), ("post_fw", "Fails")]
    assert heard.arguments == [((x,),), ((x,), None)]


@pytest.mark.parametrize("kind", ["pre_fw_hook", "post_fw_hook"])
def test_a_hook_that_raises_leaves_nothing_open(kind: str) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("hook")

    tracker = ModTracker()
    tracker.register_user_hooks(**{kind: fail})
    with tracker:
        with pytest.raises(ValueError, match="hook"):
            nn.Linear(2, 2)(torch.ones(2))
        assert tracker.parents == {"Global"}


def test_each_hook_is_registered_once() -> None:
    tracker, heard = ModTracker(), []
    tracker.register_user_hooks(pre_fw_hook=lambda *_: heard.append("first"))
    tracker.register_user_hooks(post_fw_hook=lambda *_: heard.append("post"))
    with pytest.raises(AssertionError, match="clear_user_hooks"):
        tracker.register_user_hooks(lambda *_: heard.append("second"), None, lambda *_: heard.append("backward"))
    model = nn.Linear(2, 2)
    with tracker:
        model(torch.ones(2)).sum().backward()
        assert heard == ["first", "post"]
        tracker.clear_user_hooks()
        tracker.register_user_hooks(lambda *_: heard.append("second"))
        model(torch.ones(2)).sum().backward()
    assert heard == ["first", "post", "second"]


def test_known_names() -> None:
    inner, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(inner), nn.ReLU())
    tracker = ModTracker()
    assert tracker.get_known_fqn(model) is None
    with tracker:
        model[1](torch.ones(2))
        assert tracker.get_known_fqn(model[1]) == "ReLU"
        model(torch.ones(2))
        model[0] = nn.Identity()
        model.append(other)
    assert tracker.get_known_fqn(model) == "Sequential"
    assert tracker.get_known_fqn(model[1]) == "Sequential.1"
    assert tracker.get_known_fqn(inner) == "Sequential.0.0"
    # It was never called, but its parent was.
    assert tracker.get_known_fqn(other) == "Sequential.2"
    assert tracker.get_known_fqn(nn.ReLU()) is None


def test_a_new_module_at_the_address_of_a_dead_module_has_its_own_name(tracker: Tracker) -> None:
    x = torch.ones(2)
    with tracker:
        dying: list[nn.Module] = [nn.Identity()]
        outer = nn.Sequential(dying[0])
        outer(x)
        outer[0] = nn.Identity()
        new = made_in_place_of(dying, Look, lambda: tracker.parents)
        if isinstance(tracker, ModTracker):
            assert tracker.get_known_fqn(new) is None
        outer.append(new)
        outer(x).sum().backward()
        assert new.forward_saw == new.backward_saw == [{"Global", "Sequential", "Sequential.1"}]
