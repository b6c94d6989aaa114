"""Lets a compiled program step envpool's environments, without Python.

envpool has handlers for XLA's foreign functions: `send` gives actions to a
pool, and `recv` waits for its results. envpool takes the pool from a constant
of the program. Here, each handler gets a wrapper, which takes the pool from an
argument. So all pools of a kind can share a program, and a cache can keep it.
The wrapper also calls the hooks of `XlaEnv.init`. It is in Python, but it does
not hold Python's lock while the environments step.
"""

from collections.abc import Callable, MutableMapping
import ctypes
import sys
from typing import Any
import weakref

import jax
import numpy as np

from podrl.messages import one_line
from podrl.types import Array, Tree, XlaEnv

# XLA's C API, in words of 8 bytes. A handler takes the address of a frame, and
# returns the address of an error, or None.
_Word = ctypes.c_uint64
_Frame = _Word * 22  # XLA_FFI_CallFrame
_FRAME_SIZE = 168  # Without the last field, which was added later.
_SIZE, _API, _ARGUMENTS, _ATTRIBUTES = 0, 2, 9, 20  # Fields of a frame.
_CREATE_ERROR = 6 * 8  # Offset of XLA_FFI_Error_Create in an XLA_FFI_Api.
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_DATA = 3 * 8  # Offset of the address of the data in an XLA_FFI_Buffer.
_INT64 = 5  # XLA_FFI_DataType_S64
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

_get_name: Any = ctypes.pythonapi.PyCapsule_GetName
_get_name.argtypes, _get_name.restype = [ctypes.py_object], ctypes.c_char_p
_get_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer.restype = ctypes.c_void_p


def _word(address: int) -> int:
  return _Word.from_address(address).value


def _make_error(api: int, error: BaseException) -> Any:
  """Returns the address of an error that the handler returns to XLA.

  If an exception left the handler, ctypes would print it, and XLA would go on.
  """
  message = ctypes.c_char_p(one_line(error, with_kind=True).encode())
  address = _Word.from_buffer(message).value
  # The first is the size in bytes.
  fields = (_Word * 4)(32, 0, address, _INTERNAL)
  create: Any = _Handler(_word(api + _CREATE_ERROR))
  return create(ctypes.addressof(fields))


class _Pool:
  """A pool that a program steps; see `XlaEnv.init`."""

  def __init__(
    self, address: int, begin: Callable[[], bool], end: Callable[[], None]
  ):
    self._begin, self._end = begin, end
    self._is_stepping = False
    # The attributes of a frame: an array with the address of a number, which
    # consists of a type and the address of its value.
    self._value = _Word(address)
    self._number = (_Word * 2)(_INT64, ctypes.addressof(self._value))
    self._array = _Word(ctypes.addressof(self._number))
    self.attributes = ctypes.addressof(self._array)

  def send(self, native: Callable[[int], Any], frame: int) -> Any:
    """Calls envpool's handler `send`, unless the pool must not step."""
    self._is_stepping = self._begin()
    return native(frame) if self._is_stepping else None

  def recv(self, native: Callable[[int], Any], frame: int) -> Any:
    """Calls envpool's handler `recv`, if `send` called its handler."""
    if not self._is_stepping:
      return None
    error = native(frame)
    self._end()
    return error


# The key is the address of envpool's object, which owns the `_Pool`.
_pools: MutableMapping[int, _Pool] = weakref.WeakValueDictionary()
# By target. Kept: XLA may call a handler at any time.
_handlers: dict[str, Any] = {}
_frame_sizes: set[int] = set()  # What XLA reports when it registers handlers.


def _register(target: str, name: str, capsule: Any) -> None:
  """Registers a wrapper of envpool's handler `name`, which is in `capsule`."""
  native: Any = _Handler(_get_pointer(capsule, _get_name(capsule)))

  def handle(address: int) -> Any:
    frame = _Frame.from_address(address)
    if not frame[_ARGUMENTS]:  # XLA only asks for the version of the handler.
      _frame_sizes.add(frame[_SIZE])
      return native(address)
    try:
      first_argument = _word(frame[_ARGUMENTS])
      pool = _pools[_word(_word(first_argument + _DATA))]
      # Copied: another actor's thread may use the same attributes.
      own_frame = _Frame.from_buffer_copy(frame)
      own_frame[_ATTRIBUTES] = pool.attributes
      return getattr(pool, name)(native, ctypes.addressof(own_frame))
    except BaseException as error:
      return _make_error(frame[_API], error)

  # If two threads register one target, XLA wants the same handler from both.
  handler = _handlers.setdefault(target, _Handler(handle))
  jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), 'cpu')


def release(pool: Any) -> None:
  """Drops what `XlaEnv.init` added: its hooks may refer to the pool's owner.

  Otherwise, a pool that nothing uses keeps its threads and its memory until
  Python's garbage collector runs.
  """
  pool.podrl_pool = None


def make_xla_env(pool: Any) -> XlaEnv | None:
  """Makes an `XlaEnv` from envpool's pool; its step returns what `pool` does.

  It returns None if envpool does not support this.
  """
  if sys.platform != 'linux':
    return None
  try:
    functions = dict(pool._xla())
  except RuntimeError:  # The size of an observation varies.
    return None
  library_class = type(pool).__mro__[1]
  prefix = f'{library_class.__module__}.{library_class.__name__}'
  for name, (_, _, (capsule, _)) in functions.items():
    if f'{prefix}.{name}' not in _handlers:
      _register(f'{prefix}.{name}', name, capsule)
  handle = functions['send'][0]
  *_, action_spec = pool.spec.action_array_spec.values()

  def init(begin: Callable[[], bool], end: Callable[[], None]) -> Tree | None:
    jax.devices('cpu')  # XLA registers handlers when it makes its devices.
    if _frame_sizes != {_FRAME_SIZE}:
      return None  # This version of JAX has another API.
    address = int.from_bytes(handle, sys.byteorder)
    _pools[address] = pool.podrl_pool = _Pool(address, begin, end)
    return {'pool': np.frombuffer(handle, np.uint8)}

  def call(name: str, *arguments: Array) -> Any:
    _, (_, results), _ = functions[name]
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in results]
    function = jax.ffi.ffi_call(
      f'{prefix}.{name}',
      shapes,
      input_output_aliases={0: 0},  # A skipped call must keep the handle.
    )
    return function(*arguments, handle=0)

  def step(env_state: Tree, action: Array) -> tuple[Tree, Any]:
    _, (_, (_, *specs)), _ = functions['recv']
    with jax.enable_x64(False):  # podrl computes in 32 bits.
      dtypes = [jax.dtypes.canonicalize_dtype(dtype) for dtype, _ in specs]
    with jax.enable_x64(True):  # envpool uses float64.
      action = action.astype(action_spec.dtype)
      (handle,) = call('send', env_state['pool'], *pool._from(action))
      handle, *results = call('recv', handle)
      results = [x.astype(dtype) for x, dtype in zip(results, dtypes)]
    return {'pool': handle}, pool._to(results, False, True)

  return XlaEnv(init, step)
