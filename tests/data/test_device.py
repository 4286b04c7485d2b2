import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.data.pipeline import device_batches, local_rows
from vit_jax.parameters.sharding import batch_sharding, create_mesh


def host_batch(seed=0, size=16):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (size, 4, 4, 3), np.uint8),
        "label": rng.integers(0, 10, size).astype(np.int32),
        "mask": np.ones(size, np.float32),
    }


@pytest.mark.parametrize(
    ("data", "fsdp", "tensor"), [(8, 1, 1), (2, 2, 2), (1, 1, 8), (4, 1, 2), (1, 8, 1)]
)
def test_device_batches_equal_host_batches(data, fsdp, tensor):
    sharding = batch_sharding(create_mesh(data=data, fsdp=fsdp, tensor=tensor))
    np.testing.assert_array_equal(local_rows(sharding, 16), np.arange(16))
    hosts = [host_batch(seed) for seed in range(5)]
    devices = list(device_batches(iter(hosts), sharding, batch_size=16))
    assert len(devices) == 5
    for host, device in zip(hosts, devices, strict=True):
        for key in host:
            assert device[key].sharding == sharding
            assert device[key].dtype == host[key].dtype
            np.testing.assert_array_equal(device[key], host[key])
            assert device[key].addressable_shards[0].data.shape[0] == 16 // (data * fsdp)


def test_looks_ahead():
    """The first step waits for its own batch alone."""
    taken, ahead = [], []
    hosts = (taken.append(seed) or host_batch(seed) for seed in range(6))
    batches = device_batches(hosts, batch_sharding(create_mesh()), batch_size=16, prefetch=2)
    for index, _ in enumerate(batches):
        ahead.append(len(taken) - index - 1)
    assert ahead == [0, 1, 2, 2, 1, 0]


class OneProcess:
    """What one of several processes sees of a sharding: its own devices."""

    def __init__(self, sharding, devices):
        self._sharding = sharding
        self._devices = devices

    def addressable_devices_indices_map(self, shape):
        indices = self._sharding.devices_indices_map(shape)
        return {device: indices[device] for device in self._devices}


def test_local_rows_of_several_processes():
    devices = jax.devices()
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "tensor"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    halves = [OneProcess(sharding, devices[:4]), OneProcess(sharding, devices[4:])]
    assert [local_rows(half, 8).tolist() for half in halves] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Tensor parallelism over processes: both need every row.
    halves = [OneProcess(sharding, devices[::2]), OneProcess(sharding, devices[1::2])]
    assert [local_rows(half, 8).tolist() for half in halves] == [list(range(8))] * 2
    # Devices in an order of their own: a process may hold rows that are not adjacent.
    other = OneProcess(sharding, [devices[0], devices[1], devices[4], devices[5]])
    assert local_rows(other, 8).tolist() == [0, 1, 4, 5]
