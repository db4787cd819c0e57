"""New engine packages from templates: the work behind ``furnace new-engine``."""

from furnace.scaffold.names import EngineNameError, EngineNames
from furnace.scaffold.package import LEVELS, Level, ScaffoldError, write_package

__all__ = ["LEVELS", "EngineNameError", "EngineNames", "Level", "ScaffoldError", "write_package"]
