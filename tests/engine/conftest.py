from __future__ import annotations

import sys
from pathlib import Path

# Test modules are not packages (--import-mode=importlib); this makes engine_support importable for them.
sys.path.append(str(Path(__file__).parent))
