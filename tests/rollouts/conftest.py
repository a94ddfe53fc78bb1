"""The tiny models of the teams' tests."""

from ..teams.conftest import gpt2_folder, llama_folder

__all__ = ["gpt2_folder", "llama_folder"]
