"""Chips that a run could have, and the time of an all-reduce among many.

A core is what JAX calls a device: half a chip of TPU v3, a whole one of the
others. Figures of a chip that has two cores are halved.

Sources, by the letters in the table:
  [G] Google Cloud, Cloud TPU documentation, pages "TPU v3", "TPU v4", "TPU v5e",
      "TPU v5p", "TPU v6e": peak in bfloat16, memory bandwidth, size of a pod.
      Interconnect: all-reduce bandwidth of a pod over its chips (v5p: 4,800
      Gbps a chip). Between pods: data-centre bandwidth of a pod over its chips.
  [S] Austin et al. 2025, How to Scale Your Model: 1 us a hop between TPUs.
  [M] Google Cloud, machine types: vCPUs of a host over its chips (n1 of v3-8;
      ct4p, ct5lp, ct5p, ct6e; a2-highgpu, a3-highgpu).
  [A] NVIDIA A100 datasheet; NVLink 600 GB/s is both ways; DGX A100: 200 Gb/s
      of network for each GPU.
  [H] NVIDIA H100 SXM datasheet; NVLink 900 GB/s; DGX H100: 400 Gb/s.
  [N] NCCL, src/graph/tuning.cc: about 5 us for a hop over a network.
  [?] Assumed, for want of a published figure: 1 us for an operation on a TPU
      and 3 us on a GPU, 20 us for a hop between TPU pods.
A TPU multiplies float32 by default in one bfloat16 pass, so its peaks are alike.
"""

import math
from typing import NamedTuple


class Chip(NamedTuple):
  """One core and how it is linked.

  Attributes:
    peak_bfloat16: FLOP/s of matrix products.
    peak_float32: the same, as JAX computes them by default.
    memory_bandwidth: bytes/s.
    operation_seconds: the least that one operation of a program takes.
    link_bandwidth: bytes/s that a core sends to its pod in an all-reduce.
    hop_seconds: latency between neighbours.
    torus_dims: of the pod; 1 is a ring, 0 a switch, used as a tree.
    pod_size: cores in a pod.
    far_bandwidth: bytes/s that a core sends to other pods.
    far_hop_seconds: latency between pods.
    host_cpus: virtual CPUs of a host for each core.
  """

  peak_bfloat16: float
  peak_float32: float
  memory_bandwidth: float
  operation_seconds: float
  link_bandwidth: float
  hop_seconds: float
  torus_dims: int
  pod_size: int
  far_bandwidth: float
  far_hop_seconds: float
  host_cpus: float


CHIPS = {
  # [G] 123 TFLOP/s, 900 GB/s, 340 TB/s over 1,024 chips; [M] 96 on 8 cores.
  'tpu_v3': Chip(
    61.5e12, 61.5e12, 450e9, 1e-6, 166e9, 1e-6, 2, 2048, 1e9, 20e-6, 12.0
  ),
  # [G] 1.1 PB/s over 4,096 chips; [M] 240 on 4 chips.
  'tpu_v4': Chip(
    275e12, 275e12, 1200e9, 1e-6, 268e9, 1e-6, 3, 4096, 1e9, 20e-6, 60.0
  ),
  # [G] 51.2 TB/s and 6.4 Tbps over 256 chips; [M] 224 on 8.
  'tpu_v5e': Chip(
    197e12, 197e12, 819e9, 1e-6, 200e9, 1e-6, 2, 256, 3.1e9, 20e-6, 28.0
  ),
  # [G] 4,800 Gbps a chip, 8,960 chips; [M] 208 on 4.
  'tpu_v5p': Chip(
    459e12, 459e12, 2765e9, 1e-6, 600e9, 1e-6, 3, 8960, 1e9, 20e-6, 52.0
  ),
  # [G] 102.4 TB/s and 25.6 Tbps over 256 chips; [M] 180 on 8.
  'tpu_v6e': Chip(
    918e12, 918e12, 1638e9, 1e-6, 400e9, 1e-6, 2, 256, 12.5e9, 20e-6, 22.5
  ),
  # [A] 40 GB; TF32 is JAX's default for float32. [M] 12 a GPU.
  'a100': Chip(
    312e12, 156e12, 1555e9, 3e-6, 300e9, 5e-6, 0, 8, 25e9, 5e-6, 12.0
  ),
  # [H] dense; [M] 208 on 8 GPUs.
  'h100': Chip(
    989e12, 494e12, 3350e9, 3e-6, 450e9, 5e-6, 0, 8, 50e9, 5e-6, 26.0
  ),
}


def _hops(num_cores: int, torus_dims: int) -> float:
  """Hops of an all-reduce: there and back along each axis, or up a tree."""
  if not torus_dims:
    return 2 * math.log2(num_cores)
  side = num_cores ** (1 / torus_dims)
  return 2 * torus_dims * (side - 1)


def all_reduce_seconds(num_bytes: float, num_cores: int, chip: Chip) -> float:
  """The time of one all-reduce.

  2 (n - 1) / n x bytes / bandwidth + hops x latency, in a pod; between k pods
  of m cores the same of what each core holds after its pod's reduce-scatter,
  bytes / m, over a tree.

  Args:
    num_bytes: of the vector.
    num_cores: n, over which it is summed.
    chip: each of them.

  Source: Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms; for
  tori, How to Scale Your Model, Sharded Matrices.
  """
  inside = min(num_cores, chip.pod_size)
  seconds = 2 * (inside - 1) / inside * num_bytes / chip.link_bandwidth + (
    _hops(inside, chip.torus_dims) * chip.hop_seconds
  )
  pods = math.ceil(num_cores / chip.pod_size)
  if pods > 1:
    seconds += 2 * (pods - 1) / pods * num_bytes / inside / chip.far_bandwidth
    seconds += _hops(pods, 0) * chip.far_hop_seconds
  return seconds
