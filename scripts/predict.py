"""Predicts the classes of images, or of their pixels; or numbers.

    python scripts/predict.py MODEL photo.jpg holiday/ --picture=sheet.png
    python scripts/predict.py MODEL photos/ --json > answers.jsonl
    python scripts/predict.py runs/segmentation photos/ --output=masks

MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list. All images in folders are used. If an image
cannot be read, it is reported, the others are processed, and the exit status is 1.
"""

import sys

from vit_jax import arguments, launch

if __name__ == "__main__":
    parser = arguments.create_model_parser(__doc__, source="model to use", batch_size=64)
    add = parser.add_argument
    add("images", metavar="IMAGES", nargs="+", help="image files and folders")
    add("--top", type=int, default=1, metavar="N", help="classes per image (default 1)")
    add("--loss", default="", help="softmax or sigmoid (default: as in training, if known)")
    add("--picture", default="", metavar="FILE", help="draw images and classes to this file")
    add("--output", default="", metavar="DIR", help="write maps of pixels and overlays there")
    add("--short_side", type=int, default=0, help="pixels to resize to for a model of pixels")
    add("--json", action="store_true", dest="as_json", help="print one JSON object per image")
    options = vars(parser.parse_args())
    if not options["as_json"]:
        launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.inference.predict import predict

        sys.exit(1 if predict(**options) else 0)
