"""What must be so before anything is imported."""

from __future__ import annotations

import os

# Before torch is imported, as its plugin does: spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
