"""Replacements for ``merge`` and ``unmerge`` of peft's LoRA on 4-bit linear layers.

peft merges an adapter by quantizing the sum, and unmerges it by quantizing the difference. Both steps round, so the
original bytes are lost. The replacements keep a copy of these bytes in host memory. Merged and original bytes go into
the same tensors, so that CUDA graphs stay valid.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ...nf4.identity import Identity, OwnRef, nobody
from ...nf4.weight import PackedWeight
from ...patching.counters import counters
from ...patching.quant_state import weight_of
from ...patching.reasons import Reason
from ...patching.replacement import Fallbacks, Function, around
from ...patching.switch import switch

gate, offload_gate = switch.gates["merge"], switch.gates["offload"]
NAME = "nf4_patch_unmerged"  # the attribute of peft's layer that holds an ``Unmerged``
fallbacks = Fallbacks("peft.tuners.lora.bnb.Linear4bit.unmerge")
# for each of peft's layers, the number of modules that hold the layer's weight; each merge takes its layer's number out
holders = WeakIdKeyDictionary()


class Parts(NamedTuple):
    """The tensors of a packed weight whose contents a requantization changes."""

    packed: Tensor
    scales: tuple[Tensor, ...]  # absmax, and for a nested weight the second level's absmax and the offset

    @classmethod
    def of(cls, weight: Any) -> Parts | None:
        """Return the parts of a ``Params4bit``, or None if it is not quantized or has no version counters."""
        found = packed_weight(weight)
        if found is None:
            return None
        scales = found.absmax, found.absmax2, found.offset
        return cls(weight.detach().as_subclass(Tensor), tuple(each for each in scales if each is not None))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.packed, *self.scales)

    def fits(self, other: Parts) -> bool:
        layouts = [[(t.shape, t.stride(), t.dtype, t.device) for t in each.tensors()] for each in (self, other)]
        return layouts[0] == layouts[1]

    def copy_(self, other: Parts) -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


class Unmerged:
    """The bytes of a linear layer before adapters were merged into it.

    ``identity`` is that of the weight as nf4_patch last wrote it. If other code changes the weight, the bytes are not
    restored.
    """

    restores = False  # whether a restore has begun. If it was interrupted, the next one begins again

    def __init__(self, weight: Any, parts: Parts):
        self.bytes = Parts(parts.packed.to("cpu", copy=True), tuple(each.to("cpu", copy=True) for each in parts.scales))
        self.bias: Tensor | None = None
        self.mark(weight)

    def mark(self, weight: Any) -> None:
        self.identity, self.restores = Identity(weight_of(weight, weight.quant_state)), False
        tensors = [reference() for reference in self.identity.tensors]
        self.identity.tensors = tuple(nobody if tensor is None else OwnRef(tensor) for tensor in tensors)

    def holds(self, weight: Any) -> bool:
        """Return whether the weight is unchanged since the last ``mark``."""
        found = packed_weight(weight)
        return found is not None and (self.identity.has(weight) if self.restores else self.identity.holds(found))

    def __deepcopy__(self, memo: dict[int, Any]) -> Unmerged:
        copied: Unmerged = object.__new__(type(self))
        # shared, because they are never written; the identity holds for no copy of the weight
        copied.bytes, copied.bias, copied.identity = self.bytes, self.bias, self.identity
        weight = self.identity.tensors[0]()
        twin = memo.get(id(weight))  # deepcopy has copied the layer's modules before this attribute
        if self.holds(weight) and packed_weight(twin) is not None:  # a copy in inference mode has no version counters
            copied.mark(twin)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle None, so that peft's ``unmerge`` runs after loading."""
        return type(None), ()


def packed_weight(weight: Any) -> PackedWeight | None:
    found = weight_of(weight, getattr(weight, "quant_state", None))
    is_packed = type(weight).__name__ == "Params4bit" and isinstance(found, PackedWeight)
    return found if is_packed and not any(each.is_inference() for each in found.tensors()) else None


def is_shared(layer: Any) -> bool:
    """Return whether a second module holds the layer's weight, as with ``layer_replication``. Its bytes must not change."""
    # One search through all modules serves every merge of a model.
    if layer not in holders:
        modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
        numbers = Counter(id(p) for module in modules for p in list(vars(module).get("_parameters", {}).values()))
        holders.clear()
        for each in modules:
            base = vars(each).get("_modules", {}).get("base_layer")
            weight = None if base is None else vars(base).get("_parameters", {}).get("weight")
            if Parts.of(weight) is not None:
                holders[each] = numbers[id(weight)]
    return bool(holders.pop(layer, 1) > 1)


def unmerged(layer: Any) -> Unmerged | None:
    """Return the bytes before the merge, or None if other code has changed the weight."""
    saved = vars(layer).get(NAME)
    return saved if saved is not None and saved.holds(layer.get_base_layer().weight) else None


@around
def merge(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``Linear4bit.merge`` to save the packed bytes, and to write the merged bytes into the same tensors.

    If only the option ``offload`` is on, no bytes are saved. The merged bytes still go into the same tensors, because peft
    would leave each merged layer on the GPU.
    """
    base = self.get_base_layer()
    parts, saved = Parts.of(base.weight), unmerged(self)
    if parts is not None and is_shared(self):
        vars(self).pop(NAME, None)
        original(self, *args, **kwargs)
        return
    if parts is not None and not self.merged_adapters and gate.on:
        with torch.inference_mode(False), torch.no_grad():
            saved = saved or Unmerged(base.weight, parts)
            saved.bias = base.bias.clone() if any(self.lora_bias.values()) else None
    vars(self)[NAME] = saved
    # Tensors made in inference mode have no version counters, and training cannot use them.
    with in_place(self, saved), torch.inference_mode(False), torch.no_grad():
        original(self, *args, **kwargs)


@contextlib.contextmanager
def in_place(layer: Any, saved: Unmerged | None) -> Iterator[None]:
    """Make peft's requantization reuse the weight's existing tensors."""
    base = layer.get_base_layer()
    before = base.weight
    attributes = dict(vars(before))
    try:
        yield
    finally:  # if an adapter is broken, peft has already merged the adapters before it
        vars(before).clear()
        vars(before).update(attributes)  # peft has marked the weight as not quantized
        is_moved = base.weight is not before and (saved is not None or offload_gate.on)
        if is_moved and not put_back(base, before, saved):
            vars(layer).pop(NAME, None)
        elif saved is not None:  # peft's merge of DoRA after another adapter unmerges and merges the layer in between
            vars(layer)[NAME] = saved


def put_back(base: Any, before: Any, saved: Unmerged | None) -> bool:
    """Copy the merged bytes into the tensors of ``before``, and make ``before`` the layer's weight again.

    Return False if the bytes do not fit.
    """
    merged, into = Parts.of(base.weight), Parts.of(before)
    if merged is None or into is None or not into.fits(merged):
        return False
    with torch.inference_mode(False), torch.no_grad():
        into.copy_(merged)
    if saved is None:
        before.quant_state.dtype = base.weight.quant_state.dtype  # the dtype of the sum, as in peft
    else:
        saved.mark(before)
    base.quant_state = before.quant_state
    base.weight = before  # last, so that an interrupt leaves the merged weight
    return True


@around
def unmerge(original: Function, self: Any) -> None:
    """Replace ``Linear4bit.unmerge`` to restore the packed bytes and the bias."""
    base, saved = self.get_base_layer(), unmerged(self)
    if not self.merged_adapters:
        original(self)
        return
    parts = Parts.of(base.weight)
    if saved is None or parts is None:
        vars(self).pop(NAME, None)
        if gate.on:
            fallbacks.count(Reason.MERGE_CHANGED)
        with in_place(self, None), torch.inference_mode(False), torch.no_grad():
            original(self)
        return
    saved.restores = True
    with torch.inference_mode(False), torch.no_grad():
        parts.copy_(saved.bytes)
        if saved.bias is not None:
            base.bias.copy_(saved.bias)
    saved.mark(base.weight)
    self.merged_adapters.clear()  # last, so that an interrupt leaves the layer merged
    counters.uses_of("merge").hits += 1
