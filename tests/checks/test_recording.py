"""Recording of forward passes: every call in its order, copies of what goes in and out, and buffers put back."""

import pytest
import torch
from torch import Tensor, nn

from mupscale.checks.recording import Recorder, buffers_kept


class Twice(nn.Module):
    """Calls its layer two times, and takes one of its inputs by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(3, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, list[Tensor]]:
        x = self.activation(self.layer(x))
        return {"outputs": [self.layer(x), mask]}


def test_calls_are_recorded_in_the_order_in_which_they_end():
    model = Twice()
    with Recorder(model) as recorder:
        model(torch.randn(2, 3), mask=torch.tensor([True, False]))
        model(torch.randn(2, 3), mask=torch.tensor([True, False]))
    assert [call.name for call in recorder.calls] == ["layer", "activation", "layer", ""] * 2
    assert recorder.order() == {"layer": 6, "activation": 5, "": 7}


def test_inputs_and_outputs_are_copies_of_floating_point_tensors():
    model, x, mask = Twice(), torch.randn(2, 3), torch.tensor([True, False])
    with Recorder(model) as recorder:
        answer = model(x, mask=mask)
    first, activation, second, whole = recorder.calls
    expected = model.layer(x).detach()
    assert torch.equal(first.outputs[0], expected)  # the activation has changed the tensor since
    assert torch.equal(activation.outputs[0], expected.relu())
    assert torch.equal(second.inputs[0], expected.relu())
    assert [len(whole.inputs), len(whole.outputs)] == [1, 1]  # without the mask
    assert not any(tensor.requires_grad for call in recorder.calls for tensor in (*call.inputs, *call.outputs))
    with torch.no_grad():
        answer["outputs"][0].zero_()
        x.zero_()
    assert whole.outputs[0].any()
    assert whole.inputs[0].any()


def test_buffers_are_put_back_after_an_error():
    model = nn.BatchNorm1d(4)

    def fail() -> None:
        with buffers_kept(model):
            model(torch.randn(8, 4))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert model.num_batches_tracked == 0
    assert not model.running_mean.any()
