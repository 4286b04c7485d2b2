"""Finds the images of a folder that are most similar to given ones, by a model's features.

    python scripts/neighbors.py MODEL photos/ --query=a.jpg --query=b.jpg --output=neighbors.png
    python scripts/neighbors.py MODEL photos/ --query=a.jpg --index=photos.npz --json

With --index the features of the folder are computed once: later calls add new and changed images.
MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list.
"""

import json

from vit_jax import arguments, launch

if __name__ == "__main__":
    parser = arguments.create_model_parser(__doc__, source="model to use", batch_size=32)
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="images to search")
    add("--query", dest="queries", action="append", required=True, help="image or folder; repeats")
    add("--feature", default="pre_logits", help="one vector per image (default pre_logits)")
    add("--index", default="", metavar="FILE.npz", help="features of the folder, read and written")
    add("--count", type=int, default=8, metavar="N", help="neighbours of each (default 8)")
    add("--output", default="", metavar="FILE", help="draw the images to this file")
    add("--json", action="store_true", help="print one JSON object per query")
    options = vars(parser.parse_args())
    as_json, output = options.pop("json"), options.pop("output")
    if not as_json:
        launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.inference.neighbors import draw_neighbors, find_neighbors
        from vit_jax.inference.predict import check_picture, printable

        if output:
            check_picture("--output", output)
        found = find_neighbors(**options)
        for query, near in found:
            rows = [{"image": path, "cosine": cosine} for path, cosine in near]
            text = "".join(f"\n{cosine:7.3f}  {printable(path)}" for path, cosine in near)
            answer = json.dumps({"query": query, "neighbors": rows})
            print(answer if as_json else printable(query) + text)
        if output:
            draw_neighbors(found, output)
