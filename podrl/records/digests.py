"""Digests of a directory's files: whether they are as they were written."""

import hashlib
import os

from podrl.records import workdir

_NAME = 'digests.json'
_FORMAT = 1  # Of a checkpoint; a larger one is from a newer version.


class NewerFormatError(ValueError):
  """A newer version wrote it."""


def _digests(directory: str) -> dict[str, str]:
  """Of all files below the directory's own, by their relative paths."""
  found = {}
  for parent, _, names in os.walk(directory):
    for name in names if parent != directory else ():
      path = os.path.join(parent, name)
      with open(path, 'rb') as file:
        found[os.path.relpath(path, directory)] = hashlib.file_digest(
          file, 'sha256'
        ).hexdigest()
  return found


def write(directory: str) -> None:
  """Writes the digests of a checkpoint into it.

  Raises:
    OSError: if they cannot be written.
  """
  workdir.write_json(
    os.path.join(directory, _NAME),
    {'format': _FORMAT, 'sha256': _digests(directory)},
  )


def check(directory: str) -> None:
  """Checks that a checkpoint is as it was written.

  Raises:
    NewerFormatError: where a newer version wrote it.
    ValueError: where a file is another, or gone; named.
  """
  contents = workdir.read_json(os.path.join(directory, _NAME))
  if contents['format'] > _FORMAT:
    raise NewerFormatError(
      f'{directory} has format {contents["format"]}, of a newer version of '
      f'podrl; this one reads {_FORMAT}'
    )
  written, found = contents['sha256'], _digests(directory)
  for name in sorted(written.keys() | found.keys()):
    if written.get(name) != found.get(name):
      raise ValueError(f'its file {name} is not as it was written')
