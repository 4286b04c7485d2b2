"""Exports a trained model to run without this code: StableHLO (needs only JAX) or ONNX.

    python scripts/export.py MODEL FOLDER --format=onnx
    python scripts/export.py MODEL FOLDER --format=stablehlo --input=uint8 --output=softmax

MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list. FOLDER gets the model, model.json and a model
card (README.md) with code that loads it. The result is loaded again and compared with the
model; if it computes something else, it is removed.
"""

import json

from vit_jax import launch
from vit_jax.arguments import add_sizes, create_parser


def batch_size(text):
    return None if text == "free" else int(text)


def main():
    parser = create_parser(__doc__)
    add = parser.add_argument
    add("source", metavar="MODEL")
    add("destination", metavar="FOLDER", help="new or empty folder")
    add("--format", required=True, help="stablehlo or onnx")
    add("--input", default="float", help="float (default): scaled images; uint8: pixels")
    add("--output", default="logits", help="logits (default), or probabilities: softmax, sigmoid")
    add("--batch", type=batch_size, default=None, help="any size (default), or a number of images")
    add(
        "--dtype",
        default="float32",
        help="of the computation: float32 (default); bfloat16, for stablehlo",
    )
    add_sizes(parser)
    add("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args())
    as_json = arguments.pop("json")
    launch.start_logging(to_stderr=True)
    with launch.one_line_errors():
        from vit_jax.export.convert import report_text
        from vit_jax.export.write import export_model

        report = export_model(**arguments)
        print(json.dumps(report, indent=2) if as_json else report_text(report))


if __name__ == "__main__":
    main()
