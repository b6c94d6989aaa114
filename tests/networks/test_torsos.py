"""Tests torsos: dtypes, scales, and the choice by observation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podrl.envs import envpool
from podrl.networks import actor_critic, torsos
from podrl.types import Discrete, EnvSpec


def _spec(shape, dtype=jnp.uint8, channels_first=False):
  obs = jax.ShapeDtypeStruct(shape, dtype)
  return EnvSpec(obs, channels_first, Discrete(3), 1, 100)


@pytest.mark.parametrize(
  'shape,expected',
  [
    ((4,), torsos.MLP),
    ((10, 5), torsos.MLP),
    ((2, 2, 3), torsos.MLP),
    ((10, 10, 4), torsos.ConvNet),
    ((84, 84, 4), torsos.ConvNet),
  ],
)
def test_auto_fits_the_observation(shape, expected):
  spec = _spec(shape)
  torso = torsos.make_torso('auto', spec, hidden_sizes=(8, 16))()
  assert isinstance(torso, expected)
  obs = jax.ShapeDtypeStruct((2, *shape), jnp.uint8)
  init = torso.init_with_output
  features, _ = jax.eval_shape(init, jax.random.key(0), obs)
  assert features.shape == (2, 16) and features.dtype == jnp.float32


@pytest.mark.parametrize(
  'name',
  ['conv', 'nature_cnn', pytest.param('impala_resnet', marks=pytest.mark.slow)],
)
def test_images_may_be_channels_first_and_uint8(name):
  image = (
    np.random.default_rng(0).integers(0, 256, (2, 40, 44, 3)).astype(np.uint8)
  )
  last = torsos.make_torso(name, _spec(image.shape[1:]), hidden_sizes=(8,))()
  chw = np.moveaxis(image, -1, 1)
  first = torsos.make_torso(
    name, _spec(chw.shape[1:], channels_first=True), hidden_sizes=(8,)
  )()
  params = jax.jit(last.init)(jax.random.key(0), image)
  expected = jax.jit(last.apply)(params, image)
  moved = jax.jit(first.apply)(params, chw)
  np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-4)
  # uint8 values from 0 to 255 stand for numbers from 0 to 1.
  floats = _spec(image.shape[1:], jnp.float32)
  torso = torsos.make_torso(name, floats, hidden_sizes=(8,))()
  scaled = jax.jit(torso.apply)(params, (image / 255.0).astype(np.float32))
  np.testing.assert_allclose(scaled, expected, rtol=1e-4, atol=1e-4)


_PER_ELEMENT = np.float32([[[1, 2], [4, 8], [1, 1]]] * 3)  # `[3, 3, 2]`.


@pytest.mark.parametrize(
  'shape,dtype,scale,divisor',
  [
    ((128,), np.uint8, None, 255),  # As the memory of an Atari console.
    ((128,), np.uint8, 10.0, 10),
    ((5,), np.int8, 5.0, 5),
    ((5,), np.int32, None, 1),
    ((3,), np.float32, 255.0, 255),
    ((3,), np.float32, np.float32([1, 20, 3]), [1, 20, 3]),
    ((3,), bool, 2.0, 1),  # Zeros and ones stay.
    ((3, 3, 2), np.uint8, None, 255),
    ((3, 3, 2), np.uint8, 10.0, 10),
    ((3, 3, 2), np.float32, 255.0, 255),
    ((3, 3, 2), np.int32, _PER_ELEMENT, _PER_ELEMENT),
  ],
)
@pytest.mark.parametrize('channels_first', [False, True])
def test_numbers_are_divided_by_the_scale_of_their_leaf(
  shape, dtype, scale, divisor, channels_first
):
  def move(x):
    is_image = channels_first and np.ndim(x) >= 3
    return np.moveaxis(x, -1, -3) if is_image else x

  rng = np.random.default_rng(0)
  raw = rng.integers(-5 if dtype == np.int8 else 0, 6, (4, *shape))
  raw = raw.astype(dtype)
  plain = (raw / np.float64(divisor)).astype(np.float32)
  # Beside the leaf, an observation has one that nothing changes.
  beside = rng.normal(size=(4, 2)).astype(np.float32)
  for rest in ({}, {'beside': beside}):
    spec = _spec(move(raw[0]).shape, dtype, channels_first)
    spec = spec._replace(
      obs={'x': spec.obs}
      | {k: jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for k, v in rest.items()}
    )
    floats = {**spec.obs, 'x': jax.ShapeDtypeStruct(shape, np.float32)}
    floats = spec._replace(obs=floats, channels_first=False)
    if scale is not None:
      scales = {'x': move(scale)} | {k: 1.0 for k in rest}
      spec = spec._replace(obs_scale=scales)
    ours, expected = (
      torsos.make_torso('auto', x, hidden_sizes=(8,))() for x in (spec, floats)
    )
    params = expected.init(jax.random.key(0), {'x': plain, **rest})
    np.testing.assert_allclose(
      ours.apply(params, {'x': move(raw), **rest}),
      expected.apply(params, {'x': plain, **rest}),
      rtol=1e-5,
      atol=1e-6,
    )


def test_both_networks_of_a_wide_observation_divide_it():
  spec = _spec((300,))
  networks = [
    actor_critic.make_network(
      torsos.make_torso('mlp', x, hidden_sizes=(8,)),
      x.obs,
      3,
      shared_torso=False,
    )
    for x in (spec, _spec((300,), jnp.float32))
  ]
  raw = np.random.default_rng(0).integers(0, 256, (1, 4, 300)).astype(np.uint8)
  params = networks[0].init(jax.random.key(0))
  assert 'TwinMLP_0' in params['params']
  first = np.zeros((1, 4), bool)
  ours = networks[0].unroll(params, raw, first, ())
  expected = networks[1].unroll(params, raw / np.float32(255), first, ())
  for x, y in zip(ours[:2], expected[:2], strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


_SHAPES = {'far': (84, 80, 3), 'near': (7, 7, 3), 'speed': (2,), 'text': (9,)}


def _dictionary(shapes):
  obs = {k: jax.ShapeDtypeStruct(x, jnp.uint8) for k, x in shapes.items()}
  return EnvSpec(obs, False, Discrete(3), 1, 100)


@pytest.mark.parametrize(
  'name,far,near',
  [
    ('auto', (8, 8, 3, 32), (3, 3, 3, 16)),
    ('nature_cnn', (8, 8, 3, 32), (3, 3, 3, 16)),
    ('conv', (3, 3, 3, 16), (3, 3, 3, 16)),
    ('impala_resnet', (3, 3, 3, 16), (3, 3, 3, 16)),
  ],
)
def test_each_image_has_convolutions_and_an_mlp_joins_all_leaves(
  name, far, near
):
  spec = _dictionary(_SHAPES)
  torso = torsos.make_torso(name, spec, hidden_sizes=(6, 8))()
  obs = {
    k: jax.ShapeDtypeStruct((5, *x), jnp.uint8) for k, x in _SHAPES.items()
  }
  init = torso.init_with_output
  features, params = jax.eval_shape(init, jax.random.key(0), obs)
  assert features.shape == (5, 8)
  *images, mlp = params['params'].values()
  kernels = [x['Conv_0']['kernel'].shape for x in images]
  assert kernels == [far, near]
  # The features of two images, 8 each, and 2 + 9 numbers.
  assert mlp['Dense_0']['kernel'].shape == (8 + 8 + 2 + 9, 6)


def test_an_mlp_can_read_the_image_of_a_dictionary():
  torso = torsos.make_torso('mlp', _dictionary(_SHAPES), hidden_sizes=(8,))()
  assert isinstance(torso, torsos.MLP)
  assert torso.scales == (255.0,) * 4


@pytest.mark.parametrize(
  'name,shapes,size',
  [
    ('conv', {'speed': (2,), 'text': (9,)}, 3),
    ('nature_cnn', {'near': (7, 7, 3), 'text': (9,)}, 36),
  ],
)
def test_a_dictionary_without_a_fitting_image_is_refused(name, shapes, size):
  with pytest.raises(ValueError, match=f'{size} x {size}.*auto'):
    torsos.make_torso(name, _dictionary(shapes), hidden_sizes=(8,))


def test_nature_cnn_has_its_published_parameters():
  # 8*8*4*32+32 + 4*4*32*64+64 + 3*3*64*64+64 + 7*7*64*512+512 = 1,684,128.
  torso = torsos.make_torso(
    'nature_cnn', _spec((84, 84, 4)), hidden_sizes=(512,)
  )()
  obs = jax.ShapeDtypeStruct((1, 84, 84, 4), jnp.uint8)
  params = jax.eval_shape(torso.init, jax.random.key(0), obs)
  assert sum(x.size for x in jax.tree.leaves(params)) == 1_684_128


def test_standardized_images_have_mean_0_and_deviation_1():
  images = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 2))
  expected = np.stack([(x - x.mean()) / x.std() for x in images])
  np.testing.assert_allclose(
    torsos.standardize(images / np.float32(255)), expected, rtol=0.01
  )
  flat = torsos.standardize(np.full((1, 2, 2, 1), 7, np.float32))
  np.testing.assert_array_equal(flat, np.zeros((1, 2, 2, 1)))


@pytest.mark.parametrize(
  'name,is_standardized', [('conv', True), ('nature_cnn', False)]
)
def test_brightness_does_not_matter_to_the_small_network(name, is_standardized):
  torso = torsos.make_torso(name, _spec((42, 42, 4)), hidden_sizes=(8,))()
  dark = np.random.default_rng(0).integers(0, 128, (2, 42, 42, 4), np.uint8)
  params, apply = (
    jax.jit(torso.init)(jax.random.key(0), dark),
    jax.jit(torso.apply),
  )
  x, y = apply(params, dark), apply(params, dark + np.uint8(100))
  assert np.any(x)
  assert np.allclose(x, y, rtol=1e-3, atol=1e-4) == is_standardized


def test_vectors_join_the_leaves_of_an_observation():
  obs = {'a': np.asarray([[1, 2]]), 'b': np.asarray([[[True], [False]]])}
  np.testing.assert_array_equal(torsos.as_vector(obs), [[1.0, 2.0, 1.0, 0.0]])


def test_an_image_too_small_is_refused():
  with pytest.raises(ValueError, match='36 x 36'):
    torsos.make_torso('nature_cnn', _spec((10, 10, 4)), hidden_sizes=(8,))


@pytest.mark.parametrize('name', ['conv', 'nature_cnn', 'impala_resnet'])
def test_untrained_features_of_pong_have_unit_scale(name):
  env = envpool.make('Pong-v5', 4, [1, 2, 3, 4])
  env.reset()
  for _ in range(30):
    obs = env.step(np.zeros(4, np.int32)).obs
  env.close()
  torso = torsos.make_torso(name, envpool.make_spec('Pong-v5'), (256,))()
  params = jax.jit(torso.init)(jax.random.key(0), obs[:1])
  features = jax.jit(torso.apply)(params, obs)
  # With unit features, the value head gives values of about 1, the size of
  # Pong's rewards.
  assert 0.1 < np.sqrt(np.mean(np.square(features))) < 1.5
