"""Converts the weights of any source to another format, and checks that they compute the same.

    python scripts/convert_checkpoint.py SOURCE DESTINATION --format=FORMAT

SOURCE: a file or folder of any format (detected from the contents), a work directory, gs://,
https://, hf://owner/name, or a name from `scripts/zoo.py list`.
FORMAT: npz (the official code's current names), npz_published (those of the published files, which
timm reads), big_vision, timm, huggingface, orbax. With --both and huggingface, the towers of images
and texts become one CLIPModel, MetaClip2Model or SiglipModel.
"""

import json

from vit_jax import launch
from vit_jax.arguments import add_sizes, create_parser


def main():
    parser = create_parser(__doc__)
    parser.add_argument("source")
    parser.add_argument("destination", help="NAME.npz, or a new folder for the last three")
    parser.add_argument("--format", required=True, help="see above")
    add_sizes(parser)
    parser.add_argument("--drop_head", action="store_true", help="omit head and pre_logits")
    parser.add_argument("--both", action="store_true", help="towers of images and texts")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = vars(parser.parse_args())
    as_json, both = arguments.pop("json"), arguments.pop("both")
    launch.start_logging(to_stderr=True)
    with launch.one_line_errors():
        from vit_jax.export.convert import convert_checkpoint, report_text

        if both:
            from vit_jax.export.pair import convert_pair

            report = convert_pair(**arguments)
        else:
            report = convert_checkpoint(**arguments)
        print(json.dumps(report, indent=2) if as_json else report_text(report))


if __name__ == "__main__":
    main()
