"""Evaluates a model on a dataset: top-1, per class, loss, calibration, ReaL; mAP; mIoU, MAE, R2.

    python scripts/evaluate.py runs/flowers
    python scripts/evaluate.py MODEL --dataset=imagenet2012 --split=validation
    python scripts/evaluate.py runs/flowers --dataset=photos --split=test --output=report

MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list. Images go through the checkpoint's own
preprocessing, which is printed. Classes are matched by name.
"""

import json

from vit_jax import arguments, launch

if __name__ == "__main__":
    parser = arguments.create_model_parser(__doc__, source="model to evaluate", batch_size=128)
    add = parser.add_argument
    add(
        "--dataset",
        default="",
        help="TFDS name, image folder, .csv or .parquet, digits (default: the run's own)",
    )
    add("--split", default="", help="such as validation or test[:5%%] (default test)")
    arguments.add_dataset(parser)
    add("--ignore_class_names", action="store_true", help="match label i with output i")
    add(
        "--classes",
        choices=("all", "present"),
        default="all",
        help="present: predict only classes that the split has, as for ImageNet-A, -R, ObjectNet",
    )
    add("--loss", default="", help="softmax or sigmoid (default: as in training, if known)")
    add("--real", default="", metavar="real.json", help="ReaL labels of ImageNet's validation set")
    add(
        "--prompt",
        "--prompts",
        dest="prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="zero-shot with a text such as 'a photo of a {}.', a file of them, openai (80) or "
        "openai7; may be repeated",
    )
    add("--short_side", type=int, default=0, help="pixels to resize to for a model of pixels")
    add("--output", default="", metavar="DIR", help="write evaluation.json and CSV files there")
    add("--json", action="store_true", help="print only one JSON object")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    if not as_json:
        launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.inference.evaluate import evaluate
        from vit_jax.inference.evaluation_tables import table

        results = evaluate(**options)
        print(json.dumps(results) if as_json else table(results))
