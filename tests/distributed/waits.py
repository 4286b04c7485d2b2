"""An op that never returns for some images, as reading them does on a dead mount."""

import time
from collections.abc import Callable

import numpy as np


def wait_on_black() -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    def op(image: np.ndarray, _: np.random.Generator) -> np.ndarray:
        while not image.any():
            time.sleep(1)
        return image

    return op
