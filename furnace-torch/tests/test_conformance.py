"""furnace-torch goes through furnace's conformance kit, also in the form that it has on a device."""

from __future__ import annotations

from furnace.checkpoint import open_checkpoint
from furnace.contracts import BatchStepModel
from furnace.testing import BatchStepModelConformance, EngineConformance
from furnace_torch.plugin import TorchOptions, load_decoder


class TestTorch(EngineConformance):
    spec = "torch:tiny-lm?device=cpu"
    golden_tolerance = 1e-3


class TestTorchInDeviceForm(BatchStepModelConformance):
    golden_tolerance = 1e-3

    def make_model(self) -> BatchStepModel:
        with open_checkpoint("tiny-lm") as checkpoint:
            return load_decoder(checkpoint, TorchOptions(device="cpu"), self.make_context(), device_form=True)
