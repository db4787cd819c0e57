"""Where two engines part: the work behind ``furnace diff``."""

from furnace.divergence.compare import compare
from furnace.divergence.errors import DiffError
from furnace.divergence.prompts import PROMPTS, read_prompts
from furnace.divergence.report import Diff, Divergence, PromptDiff, Speed
from furnace.divergence.runs import Settings, run_forced, run_greedy

__all__ = [
    "PROMPTS",
    "Diff",
    "DiffError",
    "Divergence",
    "PromptDiff",
    "Settings",
    "Speed",
    "compare",
    "read_prompts",
    "run_forced",
    "run_greedy",
]
