"""Every key there is, with its default. Recipes start from here and only override.

The config is locked: a key that is not here cannot be set, neither by a recipe nor by
`--config.key=value`. Keys that hold None take any value of the type that their comment says.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference, placeholder


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # int; weights, dropout, data order and augmentation are functions of it

    config.duration = ConfigDict()  # the first that is set counts: steps, examples, epochs
    config.duration.steps = placeholder(int)  # updates
    config.duration.examples = placeholder(int)  # images, counting repeats
    config.duration.epochs = placeholder(float)  # passes over dataset.split

    config.dataset = ConfigDict()
    config.dataset.name = "glyphs"  # TFDS name | path of an image folder | digits | glyphs(...)
    config.dataset.data_dir = ""  # where TFDS sets are prepared; "" is TFDS_DATA_DIR or its default
    config.dataset.split = "train"  # training split, such as train[:98%]
    config.dataset.label_key = ""  # feature that holds the label; "" finds it; vtab_... computes it
    config.dataset.batch_size = 512  # examples per update over all devices and hosts
    config.dataset.repeated_augmentation = 1  # draws of each example in a batch (DeiT: 3)
    config.dataset.preprocess = "official_train(224)"  # ops for training, see data/preprocess.py
    config.dataset.eval_preprocess = "official_eval(224)"  # ops for evaluators without their own
    config.dataset.on_bad_image = "error"  # error | skip: files that cannot be decoded

    config.loader = ConfigDict()  # none of these changes a batch
    config.loader.num_threads = 2  # reading threads per worker; 0 reads in the main thread
    config.loader.num_workers = 0  # processes; 0 reads in the training process
    config.loader.prefetch = 4  # batches read ahead

    config.model = ConfigDict()
    config.model.name = "vit"  # vit | deit | bit; None is what a model does not have
    config.model.patch_size = FieldReference(16, field_type=object)  # int, or (height, width)
    config.model.hidden_size = FieldReference(192, field_type=int)
    config.model.num_layers = FieldReference(12, field_type=int)
    config.model.mlp_dim = FieldReference(768, field_type=int)
    config.model.num_heads = FieldReference(3, field_type=int)
    config.model.dropout_rate = 0.0
    config.model.attention_dropout_rate = 0.0
    config.model.stochastic_depth_rate = 0.0  # of the last block, on a line from 0 for the first
    config.model.representation_size = placeholder(int)  # width of the tanh layer before the head
    config.model.classifier = "token"  # token | gap | map
    config.model.head_bias_init = 0.0  # -10 for a sigmoid loss over many classes
    config.model.position_embedding = "learned"  # learned | sincos2d
    config.model.gelu = "tanh"  # tanh (Google's weights) | exact (those of timm, Hugging Face)
    config.model.layer_norm_epsilon = 1e-6
    config.model.resnet_layers = placeholder(tuple)  # units per stage of a hybrid or bit, (3, 4, 9)
    config.model.resnet_width_factor = 1
    config.model.dtype = "float32"  # of the computation: float32 | bfloat16
    config.model.remat = "none"  # none | full | dots | dots_with_no_batch_dims
    config.model.scan = False  # compile the encoder's blocks as one loop

    config.mix = ConfigDict()  # of images and labels, in the step; see training/mixing.py
    config.mix.mixup_alpha = 0.0  # of the Beta distribution; 0 is no mixup
    config.mix.cutmix_alpha = 0.0  # of the Beta distribution; 0 is no CutMix
    config.mix.probability = 1.0  # of mixing a batch at all
    config.mix.cutmix_probability = 0.5  # of CutMix in a mix, where both are on
    config.mix.per_example = False  # draw for each example, not once per batch

    config.objective = ConfigDict()
    config.objective.name = "classification"
    config.objective.loss = "softmax"  # softmax | sigmoid
    config.objective.label_smoothing = 0.0

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"  # adamw | adam | sgd | adafactor
    config.optimizer.learning_rate = 1e-3  # peak
    config.optimizer.weight_decay = 0.0  # decoupled, multiplied by the learning rate
    config.optimizer.decay_parameters = "kernels"  # kernels | all
    config.optimizer.decay_multipliers = ()  # pairs (regular expression on names, factor of decay)
    config.optimizer.clip_norm = placeholder(float)  # bound of the gradient's norm; None: no clip
    config.optimizer.b1 = 0.9  # Adam
    config.optimizer.b2 = 0.999  # Adam; Adafactor: the most its decay rises to
    config.optimizer.eps = 1e-8  # Adam
    config.optimizer.momentum = 0.9  # SGD, Adafactor
    config.optimizer.factored_decay = 0.8  # Adafactor's exponent: decay 1 - step ** -0.8
    config.optimizer.momentum_dtype = "float32"  # float32 | bfloat16, as stored
    config.optimizer.freeze = ""  # regular expression on parameter names; "" trains all of them
    config.optimizer.layer_decay = 1.0  # rate of each layer over that of the next; 1.0 is off

    config.schedule = ConfigDict()
    config.schedule.name = "cosine"  # cosine | linear | rsqrt | constant
    config.schedule.warmup_steps = 0
    config.schedule.linear_end = 1e-5  # last learning rate of `linear`
    config.schedule.timescale_steps = 10_000  # of `rsqrt`
    config.schedule.cooldown_steps = 0  # last steps, with a line down to 0

    config.train_step = ConfigDict()
    config.train_step.accumulation_steps = 1  # parts that a batch is cut into to save memory
    config.train_step.polyak_decay = 0.0  # of the average of parameters (0.9999); 0: no average

    config.evaluators = ConfigDict()
    config.evaluators.test = evaluator(split="test")

    config.mesh = ConfigDict()  # devices per axis; -1 is what the others leave
    config.mesh.data = -1  # copies of the model
    config.mesh.fsdp = 1  # parameters and optimizer state split so; 0: over a slice or host
    config.mesh.tensor = 1  # heads, MLP width and classes split over so many devices

    config.processes = ConfigDict()  # of a run of several; see multihost/watchdog.py
    config.processes.arrival_timeout_seconds = 300  # until all have started
    config.processes.heartbeat_timeout_seconds = 30.0  # unheard of for so long: lost, all stop
    config.processes.step_timeout_seconds = 1800.0  # no progress for so long: a hang; 0: never
    config.processes.start_timeout_seconds = 7200.0  # the same before the first update is done

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 1000  # and always after the last step
    config.checkpoint.keep = 2  # newest checkpoints kept
    config.checkpoint.best_metric = ""  # also keep the best by this, such as "test/accuracy"
    config.checkpoint.best_mode = "max"  # max | min
    config.checkpoint.keep_best = 1  # how many of the best

    config.pretrained = ConfigDict()
    config.pretrained.source = ""  # file, folder, gs://, https://, hf:// or zoo name; "": scratch
    config.pretrained.grid = placeholder(tuple)  # (rows, columns) of its tokens, if no square
    config.pretrained.reset_head = True  # new zero head; False keeps the checkpoint's
    config.pretrained.posemb = "bilinear"  # bilinear (official) | bicubic (antialiased, timm)
    config.pretrained.resize_patches = False  # allow another patch size, by pseudo-inverse
    config.pretrained.channels = ""  # another number of input channels: sum | mean | tile
    config.pretrained.class_token = ""  # class token in one of both only: add | drop

    config.sweep = ConfigDict()  # read by scripts/sweep.py alone
    config.sweep.learning_rates = ()  # to choose from; with one there is nothing to choose
    config.sweep.train_split = ""  # what the candidates train on; dataset.split less ...
    config.sweep.validation_split = ""  # ... what they are scored on
    config.sweep.published = ""  # accuracy in percent to compare with, and where it is from

    config.log = ConfigDict()
    config.log.every_steps = 50  # console, metrics.jsonl, TensorBoard
    config.log.tensorboard = True  # write event files
    config.log.wandb = ""  # project on Weights & Biases; "" is off
    config.log.profile_steps = (0, 0)  # trace from the first to the second into WORKDIR/profile
    return config.lock()


def evaluator(split: str, *, every_steps: int = 0, at_start: bool = False) -> ConfigDict:
    """One entry of `config.evaluators`; its key there is the prefix of its metrics."""
    return ConfigDict(
        {
            "name": "classification",  # key of evaluators/create.py
            "split": split,
            "preprocess": "",  # ops; "" is dataset.eval_preprocess
            "batch_size": 0,  # 0 is dataset.batch_size
            "every_steps": every_steps,  # 0 is only after the last step
            "at_start": at_start,  # also before the first update
        }
    )
