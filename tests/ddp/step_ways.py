"""The orders of forward and backward that a program may choose: each makes one step."""

from __future__ import annotations

import torch
from oracles import loss_of
from torch import Tensor, nn


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[::2], x[1::2]


def two_forwards_one_backward(model: nn.Module, x: Tensor, _index: int) -> None:
    a, b = halves(x)
    (loss_of(model(a)) + loss_of(model(b))).backward()


def two_forwards_two_backwards(model: nn.Module, x: Tensor, _index: int) -> None:
    first, second = [loss_of(model(half)) for half in halves(x)]
    first.backward()
    second.backward()


def two_forwards_two_backwards_in_reverse(model: nn.Module, x: Tensor, _index: int) -> None:
    first, second = [loss_of(model(half)) for half in halves(x)]
    second.backward()
    first.backward()


def a_step_each_on_two_halves(model: nn.Module, x: Tensor, _index: int) -> None:
    for half in halves(x):
        loss_of(model(half)).backward()


def one_output_fed_to_the_next_forward(model: nn.Module, x: Tensor, _index: int) -> None:
    hidden = model(x)
    loss_of(model(torch.cat([hidden, hidden], 1))).backward()


def a_forward_without_backward_before(model: nn.Module, x: Tensor, _index: int) -> None:
    model(x + 1)
    loss_of(model(x)).backward()


def a_forward_without_backward_between(model: nn.Module, x: Tensor, _index: int) -> None:
    loss = loss_of(model(x))
    model(x + 1)
    loss.backward()


def backward_twice_with_retain_graph(model: nn.Module, x: Tensor, _index: int) -> None:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()


def a_gradient_of_the_input_beside(model: nn.Module, x: Tensor, _index: int) -> None:
    x = x.clone().requires_grad_()
    loss_of(model(x)).backward()


def evaluation_with_no_grad_between(model: nn.Module, x: Tensor, _index: int) -> None:
    loss = loss_of(model(x))
    model.eval()
    with torch.no_grad():
        assert not model(x).requires_grad
    model.train()
    loss.backward()


def evaluation_in_inference_mode_between(model: nn.Module, x: Tensor, _index: int) -> None:
    loss = loss_of(model(x))
    model.eval()
    with torch.inference_mode():
        assert model(x).is_inference()
    model.train()
    loss.backward()


def evaluation_with_gradients_on_before(model: nn.Module, x: Tensor, _index: int) -> None:
    model.eval()
    model(x)
    model.train()
    loss_of(model(x)).backward()


AS_IN_ONE_PROCESS = [
    two_forwards_one_backward,
    two_forwards_two_backwards,
    two_forwards_two_backwards_in_reverse,
    a_step_each_on_two_halves,
    one_output_fed_to_the_next_forward,
    a_forward_without_backward_before,
    a_forward_without_backward_between,
    backward_twice_with_retain_graph,
    a_gradient_of_the_input_beside,
    evaluation_with_no_grad_between,
    evaluation_in_inference_mode_between,
    evaluation_with_gradients_on_before,
]
