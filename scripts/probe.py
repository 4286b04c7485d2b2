"""Evaluates the features of a model on a labelled dataset: few-shot, linear probe, k-NN.

    python scripts/probe.py MODEL --dataset=oxford_iiit_pet --train_split=train --split=test
    python scripts/probe.py runs/pretrain --dataset=photos --kinds=few_shot --feature=cls

MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list. Images go through the checkpoint's own
preprocessing. The model stays frozen.

few_shot: least squares in closed form on 1, 5, 10 and 25 images per class, the mean over three
selections of images and its 95 % interval. linear_probe: logistic regression; its regularisation
is chosen on a fifth of the training split. nearest_neighbors: the 20 nearest by cosine vote,
as in DINO, or --num_neighbors.
"""

import json

from vit_jax import arguments, launch

if __name__ == "__main__":
    parser = arguments.create_model_parser(__doc__, source="model to evaluate", batch_size=128)
    add = parser.add_argument
    add("--dataset", required=True, help="TFDS name, image folder, .csv or .parquet, digits")
    add("--train_split", default="train", help="images to fit (default train)")
    add("--split", default="test", help="images to evaluate (default test)")
    add("--kinds", type=arguments.names, default="few_shot,linear_probe,nearest_neighbors")
    add("--feature", default="pre_logits", help="of scripts/extract_features.py (pre_logits)")
    add("--seeds", type=int, default=3, help="selections of images, for few_shot (default 3)")
    neighbors = "votes, for nearest_neighbors (default 20)"
    add("--num_neighbors", type=int, default=20, metavar="K", help=neighbors)
    arguments.add_dataset(parser)
    add("--json", action="store_true", help="print only one JSON object")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    if not as_json:
        launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.inference.probe import probe, table

        results = probe(**options)
        print(json.dumps(results) if as_json else table(results))
