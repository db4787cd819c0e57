"""What an operator sets."""

from furnace.config.errors import ConfigError
from furnace.config.serve_config import LOG_FORMATS, LOG_LEVELS, ServeConfig, assign_options

__all__ = ["LOG_FORMATS", "LOG_LEVELS", "ConfigError", "ServeConfig", "assign_options"]
