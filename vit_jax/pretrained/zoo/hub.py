"""Repositories of Hugging Face's hub, by its own client and in its own cache.

The client reads the environment: HF_TOKEN, HF_HOME, HF_ENDPOINT (a mirror), HF_HUB_OFFLINE.
"""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

from vit_jax.errors import UserError

SCHEME = "hf://"
_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+))?")
_CONFIGS = ["config.json", "preprocessor_config.json"]
# Safe to read, so preferred; a repository may also hold half-precision and other variants.
_SAFETENSORS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
_PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]


def fetch_from_hub(address: str) -> Path:
    """The local copy of `hf://owner/name[@revision][/file]`.

    A file is fetched as it is. A whole repository becomes a folder with its config.json,
    preprocessor_config.json and weights: model.safetensors (or its shards and their index), else
    pytorch_model.bin. A revision is a branch, tag or commit; a slash in it is written %2F.

    Raises:
      UserError: no such repository, revision or file, no permission, no network and no copy from
        before, no weights in the repository, or no client installed.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(f"{address!r} must be as hf://OWNER/NAME[@REVISION][/FILE].")
    repository, revision, file = match.groups()
    revision = urllib.parse.unquote(revision) if revision else None
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f'{address} needs Hugging Face\'s client: pip install "vit_jax[hf]".'
        ) from error
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        for weights in (_SAFETENSORS, _PICKLED):
            folder = Path(
                huggingface_hub.snapshot_download(
                    repository, revision=revision, allow_patterns=[*_CONFIGS, *weights]
                )
            )
            if any(path for pattern in weights for path in folder.glob(pattern)):
                return folder
    except Exception as error:  # of the client, of its HTTP library, of the disk
        raise UserError(f"{address}: {_reason(repository, error)}") from error
    raise UserError(
        f"{address} holds neither model.safetensors nor pytorch_model.bin; name a file of it as "
        f"{SCHEME}{repository}/FILE."
    )


def _reason(repository: str, error: Exception) -> str:
    """One line for what the client raises."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    response = getattr(error.__cause__, "response", None)
    offline = f"no connection to {constants.ENDPOINT}"
    if response is not None:
        offline = f"{constants.ENDPOINT} answers with status {response.status_code}"
    login = "`hf auth login`, or set HF_TOKEN."
    # From the special to the general: some are bases of those above them.
    reasons = {
        errors.GatedRepoError: f"asks for consent: accept its terms at {page}, then {login}",
        errors.RepositoryNotFoundError: f"no such repository, or it is private: then {login}",
        errors.RevisionNotFoundError: f"no such revision; see {page}.",
        errors.LocalEntryNotFoundError: f"{offline}, and there is no copy from before in "
        f"{constants.HF_HUB_CACHE}; check the network, HTTPS_PROXY and HF_HUB_OFFLINE.",
        errors.EntryNotFoundError: f"no such file; see {page}.",
    }
    for kind, text in reasons.items():
        if isinstance(error, kind):
            return text
    return f"{' '.join(str(error).split()) or 'no reason given'} ({type(error).__name__})."
