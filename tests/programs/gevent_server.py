# ruff: noqa: E402  # gevent patches before others are imported
"""Serves a model over HTTP by gevent, all requests at once, while a greenlet trains another one."""

import warnings

import gevent
from gevent import monkey

warnings.simplefilter("ignore", FutureWarning)  # it looks at all names of torch.distributed, if that is imported
monkey.patch_all()

import json
import urllib.request
from collections.abc import Callable

import torch
import truth
from gevent.pywsgi import WSGIServer
from torch import Tensor, nn

torch.set_num_threads(1)


class Served(nn.Module):
    """Waits for something else in the middle, as for a database."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(1, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        gevent.sleep(0.001 * int(x.item() % 5))
        result: Tensor = self.after(y)
        return result


torch.manual_seed(0)
served, trained = Served(), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
truth.watch(served)
truth.watch(trained)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)


def answer(environ: dict[str, str], start_response: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
    with_number = torch.tensor([float(environ["QUERY_STRING"])])
    result = served(with_number)
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(round(result.item(), 4)).encode()]


def train() -> None:
    for _ in range(5):
        loss = trained(torch.ones(2)).sum()
        gevent.sleep(0.001)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth.step()
        truth.loss(loss)


server = WSGIServer(("127.0.0.1", 0), answer, log=None)
server.start()
training = gevent.spawn(train)


def ask(number: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/?{number}") as reply:
        return float(json.load(reply))


requests = [gevent.spawn(ask, number) for number in range(20)]
gevent.joinall([*requests, training], raise_error=True)
server.stop()
print([request.value for request in requests])
truth.report()
