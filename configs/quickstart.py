"""Draft."""

from ml_collections import ConfigDict

from configs import default


def get_config(stage: str = "pretrain") -> ConfigDict:
    config = default.get_config()
    config.model.update(
        {"patch_size": 4, "hidden_size": 64, "num_layers": 2, "mlp_dim": 128, "num_heads": 4}
    )
    config.dataset.name = "digits"
    config.dataset.preprocess = "decode|resize(16)"
    config.dataset.eval_preprocess = "decode|resize(16)"
    config.dataset.batch_size = 64
    config.duration.steps = 100
    config.schedule.warmup_steps = 10
    config.optimizer.clip_norm = 1.0
    config.checkpoint.every_steps = 50
    config.log.every_steps = 10
    return config
