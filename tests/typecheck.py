"""The checker behind jaxtyping's import hook: beartype, where an int is a float as in PEP 484.

State and parameter classes are pytrees, and JAX builds them with placeholders, abstract shapes or shardings
for leaves. Their shapes are checked whenever they hold arrays. Classes with a `__post_init__` check what they are
built from themselves, and tests want the errors that users get.
"""

import inspect

import jax
import numpy as np
from beartype import BeartypeConf, beartype

_strict = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function):
    """Checks every call, but for construction where a class checks itself, or a pytree class gets no arrays."""
    check = _strict(function)
    if "self" not in inspect.signature(function).parameters:
        return check

    def construct(self, *args, **kwargs):
        if hasattr(type(self), "_flax_dataclass") and not _holds_arrays((args, kwargs)):
            return None
        if function.__name__ == "__init__" and hasattr(type(self), "__post_init__"):
            return None
        return check(self, *args, **kwargs)

    return construct


def _holds_arrays(values) -> bool:
    leaves = jax.tree.leaves(values)
    array = (jax.Array, np.ndarray)
    return any(isinstance(x, array) for x in leaves) and all(isinstance(x, (*array, int, float, str)) for x in leaves)
