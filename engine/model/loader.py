"""Open a model by what its path is: a GGUF file or a Hugging Face folder."""

from pathlib import Path

from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelLoadError
from engine.model.gguf_loader import open_gguf
from engine.model.hf_loader import open_hf_folder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open ``path`` and check it: every tensor the model needs is there with the right shape and a
    known type.

    Raises:
        ModelLoadError: it is no model, or it is broken, incomplete or of an unsupported kind.
    """
    if path.is_dir():
        return open_hf_folder(path)
    if path.is_file():
        return open_gguf(path)
    raise ModelLoadError(f"{path}: no such model, expected a GGUF file or a Hugging Face folder")
