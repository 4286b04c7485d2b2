"""Writes features of images to an .npz: tokens, pooled features, those of any block, logits.

    python scripts/extract_features.py MODEL photos/ --features=cls,gap --output=features.npz
    python scripts/extract_features.py MODEL cifar10 --split=train --features=block_6 --output=...

MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list. With --split, IMAGES is a dataset, and its
labels and class names are also written; otherwise image files and folders.

Features: cls, gap, tokens (after the last layer norm), pre_logits (the head's input), logits,
block_0, block_0_tokens, block_0_gap, ... (after a block, before any norm; block_0 is its class
token, or the mean of its tokens if the model has none, block_0_gap that of the patches), and dist
for distilled DeiT.
"""

from vit_jax import arguments, launch

if __name__ == "__main__":
    parser = arguments.create_model_parser(__doc__, source="model to run", batch_size=64)
    add = parser.add_argument
    add("images", metavar="IMAGES", nargs="+", help="image files and folders, or a dataset")
    add("--features", type=arguments.names, required=True, metavar="NAMES", help="see above")
    add("--output", required=True, metavar="FILE.npz", help="file to write")
    add("--split", default="", help="of the dataset, such as train[:10%%]")
    arguments.add_dataset(parser)
    options = vars(parser.parse_args())
    launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.inference.features import extract_features

        extract_features(**options)
