"""Converts images to random-access shards that training reads by name, and verifies such sets.

    python scripts/prepare_data.py imagenet2012 FOLDER --data_dir=DIR [--num_workers=8]
    python scripts/prepare_data.py imagenet21k winter21_whole.tar --data_dir=DIR
    python scripts/prepare_data.py folder PHOTOS --data_dir=DIR [--resize=256]
    python scripts/prepare_data.py tfds NAME --data_dir=DIR
    python scripts/prepare_data.py --check DIR/imagenet2012/5.1.0

imagenet2012: FOLDER contains the original ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar, or
the folders train/ and val/. imagenet21k: the tar of class tars, or a folder of class tars. folder:
train/CLASS/*.jpg and so on. tfds: a name that TFDS downloads and prepares itself.

The same command resumes an interrupted preparation. Progress is on stderr;
the last line on stdout is the prepared folder. --check compares checksums, prints what is damaged
and exits with status 1.
"""

import os
import shlex
import sys

from vit_jax import launch
from vit_jax.arguments import create_parser
from vit_jax.errors import UserError


def main():
    parser = create_parser(__doc__)
    parser.add_argument("what", nargs="*", help="KIND SOURCE, or with --check a prepared folder")
    parser.add_argument("--check", action="store_true", help="verify a prepared folder instead")
    parser.add_argument("--data_dir", default="", help="TFDS root (default: $TFDS_DATA_DIR)")
    parser.add_argument("--manual_dir", default="", help="files that TFDS cannot download")
    parser.add_argument("--name", default="", help="of the set (default: SOURCE or SOURCE_RESIZE)")
    threads = min(32, os.cpu_count() or 1)
    parser.add_argument("--num_workers", type=int, default=threads, help="threads")
    parser.add_argument("--resize", type=int, default=0, help="short side of larger images, pixels")
    parser.add_argument("--quality", type=int, default=95, help="of JPEGs written by --resize")
    parser.add_argument("--on_bad_image", default="error", help="error (at the end) | skip")
    parser.add_argument("--shard_megabytes", type=float, default=256, help="a thread holds a shard")
    arguments = vars(parser.parse_args())
    what, check = arguments.pop("what"), arguments.pop("check")
    manual_dir = arguments.pop("manual_dir")
    launch.start_logging(to_stderr=True)
    with launch.one_line_errors():
        if check:
            verify(what)
        elif len(what) != 2:
            raise UserError("give KIND SOURCE, or --check FOLDER; see --help.")
        else:
            folder = prepare(what[0], what[1], manual_dir, arguments)
            from vit_jax.data.tfds_reader import data_root

            root = data_root(arguments["data_dir"])
            name = os.path.relpath(folder.parent, root)  # without its version
            print(folder)
            print(
                shlex.join([f"--config.dataset.name={name}", f"--config.dataset.data_dir={root}"])
            )


def prepare(kind, source, manual_dir, arguments):
    from vit_jax.data_preparation.prepare import build_tfds, prepare_data

    if kind == "tfds":
        return build_tfds(source, arguments["data_dir"], manual_dir)
    return prepare_data(kind, source, **arguments)


def verify(folders):
    from vit_jax.data_preparation.prepare import check_prepared

    if len(folders) != 1:
        raise UserError("--check takes one prepared folder; see --help.")
    damage = check_prepared(folders[0])
    for file, reason in damage:
        print(f"{file}: {reason}")
    print(f"{len(damage)} of its files are damaged" if damage else "all is well")
    sys.exit(1 if damage else 0)


if __name__ == "__main__":
    main()
