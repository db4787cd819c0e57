"""The model goes through furnace's conformance kit: what the scheduler relies on."""

from pathlib import Path

from furnace.testing import EngineConformance


class TestMyModel(EngineConformance):
    spec = f"python:{Path(__file__).with_name('my_model.py')}:engine"
