"""What is installed, whether it works, and what the machine has: the work behind ``furnace doctor``."""

from furnace.diagnosis.diagnose import diagnose
from furnace.diagnosis.report import Finding, Level, Machine, PluginReport, Report

__all__ = ["Finding", "Level", "Machine", "PluginReport", "Report", "diagnose"]
