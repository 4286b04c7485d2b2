"""Evaluates a model as in papers, and compares with their numbers.

    python scripts/evaluate_paper.py MODEL --suite=fewshot --workdir=runs/paper
    python scripts/evaluate_paper.py MODEL --suite=vtab --workdir=runs/paper --seeds=1

MODEL is a work directory, a weights file or folder of any known format, https://, hf://owner/name,
or a name from scripts/zoo.py list. The suites (configs/suites.py) are

  fewshot   1, 5, 10 and 25 images per class, least squares on frozen features, on seven data sets
  imagenet  an ImageNet classifier, on ImageNet, V2, -A and -R
  transfer  fine-tuning on the five data sets of table 5, the learning rate chosen on held-out data
  vtab      fine-tuning on the 19 tasks of VTAB-1k, with the means of their groups

Tasks whose data are missing, or that fail, are skipped; the table says why, and the exit status
is 2. Prints the table and writes it to WORKDIR/SUITE/suite.md and suite.json; the same command
resumes. Fine-tuning takes --config.KEY=VALUE, as --config.dataset.batch_size=64 for a small GPU.
"""

import os
import sys

from vit_jax import ROOT, launch
from vit_jax.arguments import add_share, at_least, create_parser, names, split_overrides

sys.path.append(str(ROOT))  # for the recipes

from configs import suites

if __name__ == "__main__":
    parser = create_parser(__doc__)
    add = parser.add_argument
    add("source", metavar="MODEL", help="model to evaluate")
    add("--suite", required=True, choices=suites.SUITES, help="tasks to evaluate it on")
    add("--workdir", required=True, metavar="DIR", help="results and runs; if it exists, resumes")
    add("--datasets", type=names, default=[], metavar="A,B", help="some of the suite's, or others")
    add("--seeds", type=at_least(1), default=3, help="for fine-tuning and few-shot (default 3)")
    add("--data_dir", default="", metavar="DIR", help="folder of prepared TFDS sets")
    add("--batch_size", type=int, default=128, help="except for fine-tuning (default 128)")
    add("--image_size", type=int, metavar="N", help="for fine-tuning (default 384)")
    add_share(parser)
    overrides, rest = split_overrides(sys.argv[1:])
    given = parser.parse_args(rest)
    launch.start_logging()
    with launch.one_line_errors(resumes=True):
        from vit_jax.command_line import override
        from vit_jax.errors import UserError
        from vit_jax.inference.load import load_model
        from vit_jax.sweep import suite
        from vit_jax.sweep.run import task_number
        from vit_jax.train import train_and_evaluate

        model = load_model(given.source)
        sizes = model.description.model
        tasks = suites.tasks(given.suite, sizes, given.datasets, given.image_size)
        for settings in (task["settings"] for task in tasks):
            if "config" in settings:
                settings["config"] = override(settings["config"], overrides)
            elif overrides:
                raise UserError(f"--config.{overrides[0]}: this suite trains nothing.")
        rows = suite.evaluate_suite(
            model,
            tasks,
            os.path.join(given.workdir, given.suite),
            train=train_and_evaluate,
            seeds=given.seeds,
            data_dir=given.data_dir,
            batch_size=given.batch_size,
            num_tasks=given.num_tasks,
            task=task_number(given.task, given.num_tasks, os.environ),
        )
        print(suite.markdown(rows, given.source))
        failed = [row.task for row in rows if row.state not in ("finished", "missing")]
        if failed:
            raise UserError(f"no result of {', '.join(failed)}; the table says why.")
