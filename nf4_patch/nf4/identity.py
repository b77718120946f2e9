"""The identity of a packed weight, by which code that remembers a weight notices every change of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdRef

from .weight import PackedWeight


def nobody() -> None:
    return None


class OwnRef(WeakIdRef):
    """A weak reference to the Python object, even if ``torch.utils.swap_tensors`` swaps its content with another tensor's.

    ``swap_tensors`` does not see it (libraries/pytorch/swap.py).
    """

    __slots__ = ()


class Identity:
    """A packed weight's tensors, by weak references, with their places in memory and their versions."""

    # weak references to the parameter, absmax, absmax2, code2, offset
    tensors: tuple[Callable[[], Tensor | None], ...] = (nobody,) * 5

    def __init__(self, weight: PackedWeight):
        """Record the weight before it is decoded or copied, so that ``holds`` returns False after any later write.

        Raises:
            AttributeError, RuntimeError, TypeError: a field is not a tensor, or a tensor has no version counter.
        """
        tensors = weight.tensors()
        # As long as these weak references exist, no other storage gets the same ``_cdata``. An address might be reused.
        self.storages = tuple(StorageWeakRef(each.untyped_storage()) for each in tensors)
        self.places = places(weight)
        self.versions = self.storages[0].cdata, *(each._version for each in tensors)
        self.tensors = tuple(nobody if each is None else weakref.ref(each) for each in (weight.owner(), *weight[1:5]))

    def holds(self, weight: PackedWeight, is_in_place: bool = False) -> bool:
        """Return whether the weight has exactly these tensors at the same places, and none was written to.

        A view at the parameter's address, such as the transposed weight, is the same weight. With ``is_in_place``, places
        are not compared. The caller must then compare addresses, as ``PackedWeight.memo`` does, and keep the scales'
        memory alive.
        """
        packed, absmax, absmax2, code2, offset = weight[:5]
        owner, first, second, third, fourth = self.tensors
        parameter = owner()
        return (
            (parameter is packed or (parameter is not None and parameter is packed._base))  # see PackedWeight.owner
            and first() is absmax
            and (
                self.versions == (packed.untyped_storage()._cdata, packed._version, absmax._version)
                if absmax2 is None else
                second() is absmax2 and third() is code2 and fourth() is offset
                and self.versions == (
                    packed.untyped_storage()._cdata, packed._version, absmax._version,
                    absmax2._version, code2._version, offset._version,  # type: ignore[union-attr]
                )
            )
            and (is_in_place or self.places == places(weight))
        )  # fmt: skip

    def has(self, tensor: Tensor) -> bool:
        return any(reference() is tensor for reference in self.tensors)

    def forget(self) -> None:
        self.tensors = Identity.tensors


def places(weight: PackedWeight) -> list[tuple[int, int]]:
    return [(each.untyped_storage()._cdata, each.data_ptr()) for each in weight[:5] if each is not None]
