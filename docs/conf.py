"""How the documentation is built: ``nox -s docs``."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

project = "furnace"
author = "furnace contributors"
copyright = "furnace contributors, Apache-2.0"

extensions = ["myst_parser", "public_api"]
exclude_patterns = ["_build", "_extensions", "examples", "requirements.txt"]
nitpicky = True
default_role = "literal"
highlight_language = "none"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

public_api_folders = [str(HERE.parent / package / "src") for package in ("furnace-core", "furnace-mock")]
# Only what users and authors of engines touch; the order decides where a name that several export is described.
public_api_modules = [
    "furnace.contracts",
    "furnace.runtime",
    "furnace.scheduler:SchedulerConfig",
    "furnace.sampling",
    "furnace.text",
    "furnace.session",
    "furnace.server",
    "furnace.telemetry",
    "furnace.plugins",
    "furnace.checkpoint",
    "furnace.testing",
    "furnace_mock",
]

html_theme = "furo"
html_title = "furnace"
html_copy_source = False
html_show_sphinx = False
python_maximum_signature_line_length = 90
