"""Visualizes the inside of a model: figure 7 of the paper, attention maps, and more.

    python scripts/visualize.py MODEL photos/ --output=pictures
    python scripts/visualize.py runs/flowers a.jpg b.jpg --what=rollout,heads
    python scripts/visualize.py MODEL photos/ --against=OTHER --what=cka
    python scripts/visualize.py MODEL a.jpg b.jpg --what=pca,similarity --patch=4,9

filters.png: principal components of the embedding filters (figure 7, left). positions.png:
similarity of position embeddings (centre). attention_distance.png: how far each head attends
(right). rollout.png: what the output attends to, over the photo (figure 6). heads.png: what each
head of the last block attends to from the class token. pca.png: the patches' first principal
components as colours, the background black (DINOv2). similarity.png: of one patch of the first
image to all patches. cka.png: similarity of two models' blocks.

MODEL is a work directory, a weights file or folder of any known format, gs://, https://,
hf://owner/name, or a name from scripts/zoo.py list.
"""

from vit_jax import arguments, launch

if __name__ == "__main__":
    parser = arguments.create_model_parser(__doc__, source="model to visualize", batch_size=8)
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGES", help="image files and folders")
    add(
        "--what",
        type=arguments.names,
        default=[],
        help="a subset of the above, such as filters,rollout (default all)",
    )
    add("--output", default="pictures", metavar="DIR", help="output folder (default pictures)")
    add("--patch", type=arguments.pair, help="ROW,COLUMN from 1 (default the middle)")
    add("--against", default="", metavar="MODEL", help="another model, for cka")
    options = vars(parser.parse_args())
    launch.start_logging()
    with launch.one_line_errors():
        from vit_jax.inference.visualize import visualize

        visualize(**options)
