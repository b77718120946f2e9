"""What the identity of a weight answers after every change of the weight. Cache, offload and merge ask it."""

from __future__ import annotations

import functools
import weakref

import changes
import pytest
import torch
from oracle import layout_of
from torch.multiprocessing.reductions import StorageWeakRef

from nf4_patch.nf4.identity import Identity


def layout(at):
    return layout_of(at.packed, at.state)


def addresses(at):
    return [each.data_ptr() for each in layout(at).tensors()]


OTHER_FIELDS = ("quant_type", "dtype", "shape")  # fields that are no tensors


@pytest.mark.parametrize(("nested", "name"), changes.EVERY)
def test_every_change(nested, name):
    at = changes.weight(nested=nested)
    identity, before = Identity(layout(at)), addresses(at)
    assert identity.holds(layout(at)) and identity.holds(layout(at), is_in_place=True)
    changes.CHANGES[name](at)
    # FSDP's way to fill memory again leaves storage and version as they are.
    is_unseen = name in OTHER_FIELDS or ("refilled" in name and addresses(at) == before)
    assert identity.holds(layout(at)) is is_unseen
    is_unseen = name in OTHER_FIELDS or "refilled" in name or name.endswith(" .data =")
    assert identity.holds(layout(at), is_in_place=True) is is_unseen


def test_views_of_the_parameter():
    at = changes.weight()
    identity = Identity(layout(at))
    packed = at.packed
    for view, holds in ((packed.t(), True), (packed.view(-1), True), (packed[:64], True), (packed[64:], False)):
        assert identity.holds(layout_of(view, at.state)) is holds
    for other in (packed.data, packed.detach(), packed.clone(), torch.nn.Parameter(packed.data, requires_grad=False)):
        assert not identity.holds(layout_of(other, at.state))
    assert identity.holds(layout(at)) and Identity(layout_of(packed.t(), at.state)).holds(layout(at))


TENSORS = {"packed": lambda at: (at, "packed"), **{n: lambda at, f=f: f(at.state) for n, f in changes.SCALES.items()}}


@pytest.mark.parametrize("name", TENSORS)
def test_another_object_with_the_id_of_a_freed_one(name):
    """The new tensor has the memory and the version of the freed one, but other numbers."""
    at = changes.weight()
    holder, place = TENSORS[name](at)
    memory, ids = getattr(holder, place).data, []
    make = functools.partial(torch.nn.Parameter, requires_grad=False) if name == "packed" else torch.Tensor.detach
    for _ in range(50):
        setattr(holder, place, None)
        setattr(holder, place, make(memory.data))
        ids.append(id(getattr(holder, place)))
        identity = Identity(layout(at))
        setattr(holder, place, None)
        memory.copy_(changes.other(memory))
        setattr(holder, place, make(memory.data))
        assert not identity.holds(layout(at)) and not identity.holds(layout(at), is_in_place=True)
        ids.append(id(getattr(holder, place)))
    assert len({*ids}) < len(ids)


@pytest.mark.parametrize("name", TENSORS)
def test_other_memory_at_the_address_of_freed_memory(name):
    """Neither the tensor nor its version changes."""
    at = changes.weight()
    holder, place = TENSORS[name](at)
    tensor = getattr(holder, place)
    memory = tensor.detach().clone().numpy()
    for _ in range(50):
        tensor.data = torch.from_numpy(memory)
        identity, address = Identity(layout(at)), tensor.data_ptr()
        tensor.data = tensor.new_empty(0)
        tensor.data = torch.from_numpy(memory)
        assert tensor.data_ptr() == address and not identity.holds(layout(at))


def test_it_keeps_nothing_alive():
    at = changes.weight()
    identity, tensors = Identity(layout(at)), layout(at).tensors()
    freed = [*map(weakref.ref, tensors), *(StorageWeakRef(each.untyped_storage()) for each in tensors)]
    code = tensors[3]  # bitsandbytes shares it among all weights
    assert all(map(identity.has, tensors)) and not identity.has(code.detach())
    del tensors, at
    alive = [each for each in freed if not (each.expired() if isinstance(each, StorageWeakRef) else each() is None)]
    assert len(alive) == 2 and identity.has(code)
    identity.forget()
    assert not identity.has(code)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_without_a_version_counter(name):
    at = changes.weight()
    holder, place = TENSORS[name](at)
    with torch.inference_mode():
        setattr(holder, place, getattr(holder, place).clone())
    with pytest.raises(RuntimeError, match="version"):
        Identity(layout(at))
