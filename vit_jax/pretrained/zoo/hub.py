"""Repositories of Hugging Face's hub, by its own client and in its own cache.

The client reads the environment: HF_TOKEN, HF_HOME, HF_ENDPOINT (a mirror), HF_HUB_OFFLINE.
"""

from __future__ import annotations

import functools
import re
import urllib.parse
from pathlib import Path

from vit_jax.errors import UserError, import_extra

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
    huggingface_hub = import_extra(address, "huggingface_hub", "hf")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        for weights in (_SAFETENSORS, _PICKLED):
            patterns = [*_CONFIGS, *weights]
            fetch = functools.partial(huggingface_hub.snapshot_download, allow_patterns=patterns)
            folder = Path(fetch(repository, revision=revision))
            if any(path for pattern in weights for path in folder.glob(pattern)):
                return folder
    except Exception as error:  # of the client, of its HTTP library, of the disk
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{address}: {reason} (where it asks for a login: `hf auth login`, or set HF_TOKEN)"
        ) from error
    raise UserError(
        f"{address} holds neither model.safetensors nor pytorch_model.bin; name a file of it as "
        f"{SCHEME}{repository}/FILE."
    )
