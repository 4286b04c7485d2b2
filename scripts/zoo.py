"""Lists, describes and downloads the official checkpoints.

    python scripts/zoo.py list --variant=B/16 --resolution=384
    python scripts/zoo.py show augreg/B_16-imagenet2012
    python scripts/zoo.py get imagenet21k/ViT-B_16

`get` prints the path of the local copy. Of AugReg's 50,000 files `list` shows the recommended ones;
any other is augreg/FILE, or selected by accuracy, as augreg:B/16,adapt_ds=imagenet2012. Every
script takes these names, and URLs (gs://, https://, hf://OWNER/NAME).
"""

import dataclasses
import json
import logging
import signal

from vit_jax import launch
from vit_jax.arguments import create_parser
from vit_jax.wording import as_called


def parse_arguments():
    parser = create_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="one line per checkpoint")
    listing.add_argument("--family", help="first part of the name, such as augreg")
    listing.add_argument("--variant", help="architecture, such as B/16 or R50+L/32")
    listing.add_argument("--resolution", type=int, help="side of the images in pixels")
    listing.add_argument("--num_classes", type=int, help="head size, such as 21843; 0: no head")
    listing.add_argument("--min_accuracy", type=float, help="minimum ImageNet top-1 in percent")
    for name, text in (("show", "everything about a checkpoint"), ("get", "download it")):
        commands.add_parser(name, help=text).add_argument("name", help="name or URL")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def run(arguments):
    from vit_jax.pretrained.zoo import entries as zoo
    from vit_jax.pretrained.zoo import resolve as sources

    if arguments.command == "get":
        path = str(sources.resolve(arguments.name))
        return json.dumps({"name": arguments.name, "path": path}) if arguments.json else path
    if arguments.command == "show":
        entry = sources.describe_source(arguments.name) or zoo.get_entry(arguments.name)
        return json.dumps(dataclasses.asdict(entry), indent=1) if arguments.json else show(entry)
    rows = zoo.filter_entries(
        family=arguments.family,
        variant=arguments.variant,
        resolution=arguments.resolution,
        num_classes=arguments.num_classes,
        min_accuracy=arguments.min_accuracy,
    )
    return json.dumps([dataclasses.asdict(row) for row in rows]) if arguments.json else table(rows)


def table(rows):
    """One line per entry in aligned columns: text left, numbers right."""
    lines = [("name", "variant", "pixels", "classes", "size", "ImageNet", "by")]
    for row in rows:
        top1 = [(f"{result.percent:.1f}", result.by) for result in row.on_imagenet]
        cells = (row.name, row.variant or "-", str(row.resolution), str(row.num_classes))
        lines.append((*cells, row.size or "-", *(top1[0] if top1 else ("-", "-"))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'<<>>>><'[i]}{width}}}" for i, width in enumerate(widths))
    return "\n".join(form.format(*line) for line in lines)


def show(entry):
    """Every known field, and the commands that use the checkpoint."""
    from vit_jax.data.class_names import class_names

    fields = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    fields["accuracy"] = "; ".join(map(str, entry.accuracy))
    fields |= {key: entry.model.get(key, "") for key in ("classifier", "position_embedding")}
    if entry.labels:
        names = class_names(entry.labels)
        fields["labels"] = f"{entry.labels} ({names[0]} ... {names[-1]})"
    lines = [
        f"  {name:<21}{value}" for name, value in fields.items() if value not in ("", None, {})
    ]
    commands = [f"zoo.py get {entry.name}"]
    # Not the zeros of imagenet21k, and not the projections of image-text models.
    if entry.family == "augreg" or (entry.labels and entry.family != "imagenet21k"):
        commands.append(f"predict.py {entry.name} IMAGE...")
    if entry.labels == "imagenet2012":
        commands.append(f"evaluate.py {entry.name} --dataset=imagenet2012 --split=validation")
    model = f"{entry.variant},cifar10 --config.pretrained.source={entry.name}"
    model = f"{entry.name},cifar10" if entry.attributes else model
    commands.append(f"finetune.py --config=configs/finetune.py:{model} --workdir=/tmp/cifar10")
    return "\n".join([*lines, "", *(as_called(f"  python scripts/{c}") for c in commands)])


if __name__ == "__main__":
    arguments = parse_arguments()
    # Progress goes to stderr, so that FILE=$(python scripts/zoo.py get NAME) works.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with launch.one_line_errors():
        text = run(arguments)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `list | head` ends quietly
        print(text)
