"""Text towers of transformers and open_clip: embeddings, registries, tokenizers, zero-shot.

1e-5: see test_huggingface_classes.py; the largest difference seen is 1e-6 of the largest value.
"""

import collections
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import torch

from configs import lit
from tests import golden
from tests.file_server import pose_as_hub, serve_files
from tests.peers import import_timm, import_transformers
from tests.pretrained import weights
from tests.pretrained.test_huggingface_classes import SAME, SIZES, spread
from tests.pretrained.test_sources import serve_repository
from tests.pretrained.test_timm_registry import FILES
from tests.pretrained.test_timm_registry import REFUSED as REFUSED_BY_TIMM
from tests.test_train import as_of
from vit_jax import ROOT
from vit_jax.data.text import Tokenize, read_prompts
from vit_jax.errors import UserError
from vit_jax.export.convert import convert_checkpoint
from vit_jax.export.pair import convert_pair
from vit_jax.inference.load import load_model
from vit_jax.parameters.sharding import create_mesh
from vit_jax.pretrained.arrays import write_safetensors
from vit_jax.run import create_run
from vit_jax.train import train_and_evaluate
from vit_jax.trees import flatten_names

LENGTH, END = 9, 59
BLOCKS = {"hidden_size": 24, "intermediate_size": 40}
BLOCKS |= {"num_hidden_layers": 2, "num_attention_heads": 3}
TEXT = {**BLOCKS, "vocab_size": 60, "max_position_embeddings": LENGTH, "eos_token_id": END}
OF_2 = TEXT | {"eos_token_id": 2}
SIGLIP = {**TEXT, "projection_size": 10}
# Ends, of both kinds, in different places; and after them what does not count in CLIP.
TOKENS = np.random.default_rng(0).integers(5, 58, (4, LENGTH)).astype(np.int32)
TOKENS[range(4), [2, 5, 8, 1]], TOKENS[2, 4], TOKENS[:, 0] = END, 2, 49
TOKENS[range(2), [6, 3]] = 2
AWKWARD = [
    "a photo of a cat",
    "",
    "Ünïcödé façade naïve e\u0301",
    "\U0001f431\U0001f436 emoji \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "CAPITALS And MiXeD",
    "  double  blanks   and\ttabs\nlines ",
    "word " * 100,
    "it's don't we'll I'D: 3 dogs, 42 cats; 100%!",
    "_under_score_ #hash @at",
    "日本語のテキスト ½ \u00a0nbsp İstanbul",
]


@pytest.fixture(scope="module")
def transformers() -> Any:
    library = import_transformers()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@pytest.fixture(scope="module")
def open_clip() -> Any:
    import_timm()  # makes torchvision importable
    return pytest.importorskip("open_clip")


def both(text: dict[str, Any]) -> dict[str, Any]:
    return {"text_config": text, "vision_config": SIZES}


PROJECTED = {"projection_dim": 10}
CLASSES = {
    "CLIPTextModel": (TEXT, "", ""),
    "CLIPTextModelWithProjection": (TEXT | PROJECTED, "", "CLIPTextModelWithProjection"),
    "CLIPTextModelWithProjection, of 2022": (OF_2 | PROJECTED, "", "CLIPTextModelWithProjection"),
    "CLIPModel": (both(TEXT) | PROJECTED, "#txt", "CLIPTextModelWithProjection"),
    "MetaClip2Model": (both(OF_2) | PROJECTED, "#txt", "MetaClip2TextModelWithProjection"),
    "CLIPSegModel": (both(OF_2) | PROJECTED, "#txt", "CLIPTextModelWithProjection"),
    "OwlViTModel": (both(OF_2) | PROJECTED, "#txt", "CLIPTextModelWithProjection"),
    "Owlv2Model": (both(OF_2) | PROJECTED, "#txt", "CLIPTextModelWithProjection"),
    "XCLIPModel": (both(OF_2) | PROJECTED, "#txt", "CLIPTextModelWithProjection"),
    "SiglipTextModel": (SIGLIP, "", "SiglipTextModel"),
    "SiglipModel": (both(SIGLIP), "#txt", "SiglipTextModel"),
    "Siglip2Model": (both(SIGLIP), "#txt", "SiglipTextModel"),
}


# Their texts' towers: language models, or blocks of other kinds.
OTHER_CLASSES = {
    *("Aimv2Model", "AlignModel", "AltCLIPModel", "Blip2Model", "BlipModel", "ChineseCLIPModel"),
    *("FlavaModel", "GroupViTModel", "Tipsv2Model"),
    *("VideoPrismClipModel", "VisionTextDualEncoderModel"),
}


def their_embeddings(model: Any, images: Any = None) -> np.ndarray:
    tokens = torch.from_numpy(TOKENS).long()
    with torch.no_grad():
        if images is not None:
            output = model.get_image_features(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
            return getattr(output, "pooler_output", output).numpy()
        if hasattr(model, "get_text_features"):
            output = model.get_text_features(input_ids=tokens)
            return getattr(output, "pooler_output", output).numpy()
        output = model(input_ids=tokens)
    return (output.text_embeds if "text_embeds" in output else output.pooler_output).numpy()


def embeddings(loaded: Any, inputs: Any = TOKENS) -> np.ndarray:
    return loaded.features(inputs, "logits" if loaded.num_outputs else "pre_logits")


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=SAME * np.abs(expected).max())


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers(name: str, transformers: Any, tmp_path: Path) -> None:
    config, part, written = CLASSES[name]
    cls = getattr(transformers, name.partition(",")[0])
    model = cls(cls.config_class(**config)).eval()
    spread(model)
    model.save_pretrained(tmp_path)
    loaded, theirs = load_model(f"{tmp_path}{part}"), their_embeddings(model)
    assert_close(embeddings(loaded), theirs)
    if part:
        torch.save(model.state_dict(), tmp_path / "pickled.bin")
        heads = {"num_heads": BLOCKS["num_attention_heads"]}
        pickled = load_model(f"{tmp_path}/pickled.bin{part}", **heads)
        weights.assert_same(flatten_names(pickled.params), flatten_names(loaded.params))
    if name == "XCLIPModel":  # whose frames attend to each other
        with pytest.raises(UserError, match="unexpected arrays: .*message_attn"):
            load_model(tmp_path)
    elif part and name != "Siglip2Model":  # which takes patches: test_huggingface_classes.py
        images = golden.images(2, 32, 32)
        assert_close(embeddings(load_model(tmp_path), images), their_embeddings(model, images))
    if written:
        convert_checkpoint(f"{tmp_path}{part}", str(tmp_path / "ours"), format="huggingface")
        again = load_model(tmp_path / "ours")
        weights.assert_same(flatten_names(again.params), flatten_names(loaded.params))
        assert_close(embeddings(again), theirs)
        assert_close(
            their_embeddings(getattr(transformers, written).from_pretrained(tmp_path / "ours")),
            theirs,
        )


def test_no_other_class_of_transformers_is_read(transformers: Any, tmp_path: Path) -> None:
    """All with features of texts, and of images or videos; so a new one fails here."""
    images, found = {"get_image_features", "get_video_features"}, {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")  # to import hundreds takes long
        if "def get_text_features" not in text or not any(f"def {x}" in text for x in images):
            continue
        for name in re.findall(r"^class (\w+)", text, re.MULTILINE):
            methods = {*dir(cls := getattr(transformers, name, None))}
            if "get_text_features" in methods and methods & images and cls.config_class:
                found[name] = cls
    assert found.keys() == {name for name, row in CLASSES.items() if row[1]} | OTHER_CLASSES
    write_safetensors(tmp_path / "model.safetensors", {"x": np.zeros(1, np.float32)}, {})
    for name in OTHER_CLASSES:
        found[name].config_class().save_pretrained(tmp_path)
        with pytest.raises(UserError, match="model_type of the texts' tower='.*' is unknown"):
            load_model(f"{tmp_path}#txt")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("CLIPModel", both(TEXT) | PROJECTED),
        ("MetaClip2Model", both(OF_2) | PROJECTED),
        ("SiglipModel", both(TEXT | {"projection_size": SIZES["hidden_size"]})),
    ],
)
def test_both_towers_are_written_as_one(
    name: str, config: dict[str, Any], transformers: Any, tmp_path: Path
) -> None:
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**config)).eval()
    spread(model)
    model.save_pretrained(tmp_path / "theirs")
    report = convert_pair(str(tmp_path / "theirs"), str(tmp_path / "ours"), format="huggingface")
    assert report["parameters_identical"]
    images = torch.from_numpy(golden.images(2, 32, 32).transpose(0, 3, 1, 2).copy())
    logits = []
    for one in (model, cls.from_pretrained(tmp_path / "ours").eval()):
        with torch.no_grad():
            output = one(input_ids=torch.from_numpy(TOKENS).long(), pixel_values=images)
        logits.append(output.logits_per_image.numpy())
    assert_close(logits[1], logits[0])


def test_a_tower_that_is_not_there_is_named(transformers: Any, tmp_path: Path) -> None:
    transformers.ViTModel(transformers.ViTConfig(**SIZES)).save_pretrained(tmp_path / "vit")
    transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)).save_pretrained(
        tmp_path / "clip"
    )
    with pytest.raises(UserError, match=r"it has no tower of texts \('txt'\), only of images"):
        load_model(tmp_path / "vit").with_classes(["cat"])
    with pytest.raises(UserError, match=r"it has no tower of images \('img'\), only of texts"):
        load_model(f"{tmp_path}/clip#img")


def test_the_table_in_the_documentation() -> None:
    for name, (_, part, written) in CLASSES.items():
        cls, note = re.fullmatch(r"(\w+)(.*)", name).groups()  # type: ignore[union-attr]
        row = f"| `{cls}`{note} | {part and f'`{part}`'} | {written and f'`{written}`'} |"
        assert " ".join(row.split()) in documentation(), row


# open_clip's registry.
OTHER_TEXTS = {
    "hf_model_name": "text towers of CLIP and SigLIP",  # RoBERTa, mT5, NLLB
    "embed_cls": "text_cfg.embed_cls=True",  # CoCa
}
OTHER_IMAGES = {"attentional_pool": "attentional_pool=True", "ls_init_value": "ls_init_value="}


def fill(module: Any, deviation: float) -> dict[str, torch.Tensor]:
    """Seeded numbers; norms near one. Returns the arrays of its file."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_scale = "ln_" in name and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(deviation * noise + is_scale)
    return {name: x for name, x in module.state_dict().items() if name != "attn_mask"}


def write_open_clip(folder: Path, arrays: dict[str, torch.Tensor], **config: Any) -> None:
    folder.mkdir()
    arrays = {**arrays, "logit_scale": torch.tensor(1.0)}
    numbers = {name: np.ascontiguousarray(x.numpy()) for name, x in arrays.items()}
    write_safetensors(folder / "open_clip_model.safetensors", numbers, {})
    model = {"embed_dim": 16, "vision_cfg": {}, "text_cfg": {}, **config}
    content = json.dumps({"model_cfg": model, "preprocess_cfg": {}})
    (folder / "open_clip_config.json").write_text(content)


def configs_of(open_clip: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in open_clip.list_models():
        yield name, open_clip.get_model_config(name)


def forms(open_clip: Any, key: str, small: dict[str, Any], *sizes: str) -> dict[str, list[str]]:
    """Registered models by what tells one of their towers apart but for sizes."""
    found = collections.defaultdict(list)
    for name, config in configs_of(open_clip):
        tower = {k: v for k, v in {**config[key], **small}.items() if k not in sizes}
        is_plain = "timm_model_name" not in tower and isinstance(config[key].get("layers"), int)
        if is_plain or "hf_model_name" in tower:
            switches = {k: config.get(k, False) for k in ("quick_gelu", "custom_text")}
            found[json.dumps([tower, switches], sort_keys=True)].append(name)
    return found


def test_every_text_tower_of_open_clip(open_clip: Any, tmp_path: Path) -> None:
    """All of its registry: as it computes them, or refused with why."""
    small = {"width": 24, "heads": 3, "layers": 2, "vocab_size": 60, "context_length": LENGTH}
    unlike = ("hf_tokenizer_name", "tokenizer_kwargs", "mlp_ratio", "output_tokens")
    read, names = 0, forms(open_clip, "text_cfg", small, *unlike)
    for number, (form, models) in enumerate(names.items()):
        (tower, switches), folder = json.loads(form), tmp_path / str(number)
        prefix = "text." if switches["custom_text"] else ""
        why = next((why for key, why in OTHER_TEXTS.items() if key in tower), "")
        if "hf_model_name" not in tower:
            theirs = open_clip.model._build_text_tower(16, tower, switches["quick_gelu"]).eval()
            arrays = {f"{prefix}{name}": x for name, x in fill(theirs, 0.3).items()}
            arrays["visual.layer1.0.conv1.weight"] = torch.zeros(2)  # of a ResNet
        else:  # an image tower beside it tells whose file it is
            arrays = {"visual.trunk.patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)}
            arrays["text.transformer.embeddings.word_embeddings.weight"] = torch.zeros(2, 2)
        write_open_clip(folder, arrays, text_cfg=tower, **switches)
        if why:
            with pytest.raises(UserError, match=re.escape(why)):
                load_model(f"{folder}#txt")
            continue
        with torch.no_grad():
            expected = theirs(torch.from_numpy(TOKENS).long()).numpy()
        assert_close(embeddings(load_model(f"{folder}#txt")), expected)
        read += len(models)
    assert f"{read} of its {len(open_clip.list_models())} text towers" in documentation()


def documentation() -> str:
    return " ".join((ROOT / "docs/weights.md").read_text().split())


def is_read_by_timm(tower: dict[str, Any]) -> bool:
    """Whether test_timm_registry.py compares it, and open_clip adds no layer."""
    from timm.models._registry import _model_to_module

    name = tower["timm_model_name"]
    is_known = _model_to_module.get(name, "").rpartition(".")[2] in FILES
    is_refused = any(re.fullmatch(pattern, name) for pattern in REFUSED_BY_TIMM)
    return is_known and not is_refused and tower.get("timm_proj") in (None, "none")


def test_every_image_tower_of_open_clip(open_clip: Any, tmp_path: Path) -> None:
    small = {"width": 128, "head_width": 64, "layers": 2, "image_size": 32, "patch_size": 16}
    images, read = golden.images(2, 32, 32), 0
    for number, (form, models) in enumerate(
        forms(open_clip, "vision_cfg", small, "mlp_ratio", "output_tokens").items()
    ):
        (tower, switches), folder = json.loads(form), tmp_path / str(number)
        theirs = open_clip.model._build_vision_tower(16, tower, switches["quick_gelu"]).eval()
        arrays = {f"visual.{name}": x for name, x in fill(theirs, 0.1).items()}
        write_open_clip(folder, arrays, vision_cfg=tower, **switches)
        if why := next((why for key, why in OTHER_IMAGES.items() if key in tower), ""):
            with pytest.raises(UserError, match=re.escape(why)):
                load_model(folder)
            continue
        with torch.no_grad():
            expected = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
        assert_close(load_model(folder).logits(images), expected)
        read += len(models)
    towers = [config["vision_cfg"] for _, config in configs_of(open_clip)]
    read += sum(is_read_by_timm(tower) for tower in towers if "timm_model_name" in tower)
    assert f"{read} image towers" in documentation(), read


# Tokenizers, with the vocabulary of CLIP.
@pytest.fixture(scope="module")
def vocabulary(open_clip: Any) -> Path:
    return Path(open_clip.__file__).parent / "bpe_simple_vocab_16e6.txt.gz"


@pytest.fixture(scope="module")
def clip_tokenizer(transformers: Any, vocabulary: Path) -> Any:
    from open_clip.tokenizer import SimpleTokenizer

    lines = gzip.decompress(vocabulary.read_bytes()).decode().split("\n")[1:48895]
    ends = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    numbers = {ends.get(piece, piece): i for piece, i in SimpleTokenizer().encoder.items()}
    return transformers.CLIPTokenizer(numbers, [tuple(line.split()) for line in lines])


def assert_ids(op: Tokenize, texts: list[str], expected: Any) -> None:
    rng = np.random.default_rng(0)
    for text, ids in zip(texts, np.asarray(expected), strict=True):
        np.testing.assert_array_equal(op({"caption": text}, rng)["text"], ids, err_msg=repr(text))


def test_clip_of_openai_and_open_clip(open_clip: Any, vocabulary: Path) -> None:
    mended = ["&lt;b&gt; &amp;amp; \u201ccurly\u201d \u2018quotes\u2019 \ufb01", "sch\u00c3\u00b6n"]
    texts = [*AWKWARD, *mended]
    for length in (77, 8):
        expected = open_clip.tokenize(texts, context_length=length).numpy()
        assert_ids(Tokenize("caption", str(vocabulary), length, "lower"), texts, expected)
    assert Tokenize(vocab=str(vocabulary)).num_tokens == 49408


def test_clip_of_transformers(clip_tokenizer: Any, tmp_path: Path) -> None:
    options = {"padding": "max_length", "max_length": 77, "truncation": True}
    for side in ("left", "right"):
        clip_tokenizer.padding_side = side
        clip_tokenizer.save_pretrained(tmp_path / side)
        settings = tmp_path / side / "tokenizer_config.json"
        content = {**json.loads(settings.read_text()), "padding_side": side}  # as on the hub
        settings.write_text(json.dumps(content))
        expected = clip_tokenizer(AWKWARD, **options)["input_ids"]
        vocab = str(tmp_path / side / "tokenizer.json")
        assert_ids(Tokenize("caption", vocab, 77), AWKWARD, expected)


def test_siglip_2_of_transformers(transformers: Any, tmp_path: Path) -> None:
    """A tokenizer of Gemma's form, as the hub has it; the class of SigLIP 2 makes letters small."""
    trained = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    trained.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{i:02X}>" for i in range(256))]
    options: Any = {"vocab_size": 400, "special_tokens": special, "show_progress": False}
    trained.train_from_iterator(AWKWARD, tokenizers.trainers.BpeTrainer(**options))
    end = tokenizers.processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", 1)])
    trained.post_processor = end
    SiglipModel = transformers.SiglipModel
    SiglipModel(SiglipModel.config_class(**both(SIGLIP))).save_pretrained(tmp_path)
    trained.save(str(tmp_path / "tokenizer.json"))
    told = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    told |= {"tokenizer_class": "GemmaTokenizer", "padding_side": "right"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    theirs = transformers.Siglip2Tokenizer.from_pretrained(tmp_path)
    texts = [*AWKWARD, "ΟΔΥΣΣΕΥΣ"]
    expected = theirs(texts, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
    loaded = load_model(f"{tmp_path}#txt")
    for text, ids in zip(texts, expected, strict=True):
        np.testing.assert_array_equal(loaded.preprocess(text)[0], ids, err_msg=repr(text))


def test_published_prompts(open_clip: Any, tmp_path: Path) -> None:
    for key, theirs in {
        "openai": open_clip.OPENAI_IMAGENET_TEMPLATES,
        "openai7": open_clip.SIMPLE_IMAGENET_TEMPLATES,
    }.items():
        assert read_prompts([key]) == [prompt("{}") for prompt in theirs]
    (tmp_path / "mine.txt").write_text("one {}\ntwo {}\n")
    assert read_prompts(["a {}", str(tmp_path / "mine.txt")]) == ["a {}", "one {}", "two {}"]


@pytest.fixture
def clip(transformers: Any, clip_tokenizer: Any, tmp_path: Path) -> Any:
    """A CLIPModel with real tokens, and all that is in the folder of one, in `tmp_path`."""
    text = TEXT | {"vocab_size": 49408, "max_position_embeddings": 12, "eos_token_id": 49407}
    config = transformers.CLIPConfig(**both(text), projection_dim=10)
    model = transformers.CLIPModel(config).eval()
    spread(model)
    model.save_pretrained(tmp_path)
    clip_tokenizer.save_pretrained(tmp_path)
    sizes = {"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.CLIPImageProcessorPil(**sizes).save_pretrained(tmp_path)
    return model


def test_fine_tuning_both_towers_starts_from_their_loss(clip: Any, tmp_path: Path) -> None:
    """transformers' loss of the same batch; a run, killed, ends as one that was not."""
    config = lit.get_config(f"{tmp_path},captions.csv")
    config.dataset.name = "glyphs(size=32, num_examples=64)"
    config.dataset.batch_size, config.duration.steps = 16, 4
    config.evaluators.retrieval.split = "test[:16]"
    with config.unlocked():
        del config.evaluators.test
    config.schedule.update(warmup_steps=1, learning_rate=1e-2)
    config.checkpoint.every_steps, config.loader.num_threads = 2, 1
    mesh = create_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = create_run(config, mesh)
        params = run.start.load() | run.objective.start
        rng = np.random.default_rng(0)
        rows = [run.dataset.example(i, rng) for i in range(16)]
        batch = {key: np.stack([row[key] for row in rows]) for key in ("image", "text")}
        batch["mask"] = np.ones(16, np.float32)
        params["t"] = np.log(np.full(1, config.objective.temperature, np.float32))
        loss, _ = jax.jit(run.objective.loss)(params, batch, None)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    mean, std = (np.float32(settings[f"image_{key}"]) for key in ("mean", "std"))
    pixels = (batch["image"] / 255 - mean) / std
    with torch.no_grad():
        theirs = clip(
            input_ids=torch.from_numpy(batch["text"]).long(),
            pixel_values=torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()),
            return_loss=True,
        )
    assert float(theirs.loss) > 1.0
    assert float(loss) == pytest.approx(float(theirs.loss), rel=1e-5)
    whole, part = tmp_path / "whole", tmp_path / "part"
    results = train_and_evaluate(config, str(whole))
    assert 0.0 <= results["retrieval/image_to_text_recall_1"] <= 1.0
    as_of(2, whole, part)
    train_and_evaluate(config, str(part))
    names = load_model(whole), load_model(part)
    weights.assert_same(*(flatten_names(model.params) for model in names))
    before = flatten_names(load_model(tmp_path).params)
    assert any(np.any(x != before[name]) for name, x in flatten_names(names[0].params).items())
    # It goes back to transformers, with its tokenizer, which also follows the folder.
    assert convert_pair(str(whole), str(tmp_path / "back"), format="huggingface")[
        "parameters_identical"
    ]
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    moved = (tmp_path / "back").rename(tmp_path / "moved")
    image, captions = golden.images(1, 32, 32), ["a", "b"]
    expected = load_model(whole, preprocess="decode").logits(image)
    np.testing.assert_array_equal(load_model(moved).logits(image), expected)
    assert load_model(moved).zero_shot(image, captions)
    again = lit.get_config(f"{moved},captions.csv").dataset
    for chain in (again.preprocess, again.eval_preprocess):
        assert chain.count("tokenize(") == 1
    moved = moved.rename(tmp_path / "bare")
    (moved / "tokenizer.json").unlink()
    (moved / "model.json").unlink()
    with pytest.raises(UserError, match="no tokenizer beside the weights; put its tokenizer.json"):
        lit.get_config(f"{moved},captions.csv")


def test_zero_shot_in_one_line(
    clip: Any, clip_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photo and texts to probabilities, with all that is in the folder, or on the hub."""
    texts, images = ["a cat", "two DOGS"], golden.images(2, 32, 32)
    tokens = clip_tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt")
    with torch.no_grad():
        pixels = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        logits = clip(**tokens, pixel_values=pixels).logits_per_image
    loaded = load_model(tmp_path)
    for answer, expected in zip(
        loaded.zero_shot(images, texts), logits.softmax(-1).numpy(), strict=True
    ):
        assert {name for name, _ in answer} == {*texts}
        for name, probability in answer:
            assert probability == pytest.approx(expected[texts.index(name)], abs=1e-5)
    first = loaded.zero_shot(images, texts)
    assert {name for name, _ in loaded.zero_shot(images, ["a cow", "a"])[0]} == {"a cow", "a"}
    assert loaded.zero_shot(images, texts) == first
    with serve_files() as server:
        pose_as_hub(server, monkeypatch, tmp_path / "hub")
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        serve_repository(server, "some/clip", files)
        assert load_model("hf://some/clip").zero_shot(images, texts) == first
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).unlink()
    with pytest.raises(UserError, match="no tokenizer beside the weights"):
        load_model(tmp_path).zero_shot(images, texts)
