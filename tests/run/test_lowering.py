"""Tests the names of targets, and the time of an all-reduce."""

import pytest

from podrl.run import lowering

# A ring of 4 chips has 8 GB/s and hops of 0.25 s; 2 GB/s connect two rings.
_CHIP = lowering.CHIPS['v5e']._replace(
  link_bandwidth=8,
  torus_dims=1,
  pod_size=4,
  far_bandwidth=2,
  hop_seconds=0.25,
  far_hop_seconds=3.0,
)


@pytest.mark.parametrize(
  'name,num_devices,pod_size,shape',
  [
    ('v2-8', 8, 8, (2, 2)),
    ('v3-2048', 2048, 2048, (32, 32)),
    ('v4-8', 4, 4, (2, 2, 1)),
    ('v4-512', 256, 256, (4, 8, 8)),
    ('v5e-1', 1, 1, (1, 1)),
    ('v5e-8', 8, 8, (2, 4)),
    ('v5litepod-16', 16, 16, (4, 4)),
    ('2xv5e-256', 512, 256, (16, 16)),
    ('v5p-128', 64, 64, (4, 4, 4)),
    ('v6e-64', 64, 64, (8, 8)),
    ('tpu7x-32', 32, 32, (2, 2, 4)),
    ('h100:8', 8, 8, None),
    ('h200:64', 64, 8, None),
  ],
)
def test_names(name, num_devices, pod_size, shape):
  target = lowering.parse_target(name)
  assert target.num_devices == num_devices
  assert target.chip.pod_size == pod_size
  if shape:
    dims = target.chip.torus_dims
    assert lowering.slice_shape(target.num_chips, dims) == shape


def test_an_all_reduce_in_a_ring():
  # 2 x 3/4 x 16 GB at 8 GB/s take 3 s; 2 x 3 hops of 0.25 s take 1.5 s.
  assert lowering.all_reduce_seconds(16e9, 4, _CHIP) == pytest.approx(4.5)
  assert lowering.all_reduce_seconds(16e9, 1, _CHIP) == 0


@pytest.mark.parametrize(
  'torus_dims,num_hops',
  [(1, 2 * 63), (2, 2 * 2 * 7), (3, 2 * 3 * 3), (0, 2 * 6)],
)
def test_hops_of_64_devices(torus_dims, num_hops):  # 8 x 8, 4 x 4 x 4, 2^6.
  chip = _CHIP._replace(torus_dims=torus_dims, pod_size=64)
  assert lowering.all_reduce_seconds(0, 64, chip) == pytest.approx(
    0.25 * num_hops
  )


def test_an_all_reduce_between_pods():
  # The ring takes 4.5 s, as above. Between two pods, a device sends 2 x 1/2 x
  # 16/4 GB at 2 GB/s, which takes 2 s. A tree of two has 2 hops of 3 s.
  assert lowering.all_reduce_seconds(16e9, 8, _CHIP) == pytest.approx(
    4.5 + 2 + 6
  )
