"""Replacements for peft's LoRA on packed or dense experts, which ``target_parameters`` names.

peft puts a ``ParamWrapper`` around the experts module for each stack, and adds B·A to the dense stack in each forward.
nf4_patch gets A and B from the wrapper and multiplies by them separately. peft still names and saves the adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import parametrize

from ...moe.active import active_wrappers
from ...moe.product import Lora
from ...patching.replacement import Fallbacks, Function, around, instead, replacement_of
from ...patching.switch import switch
from ...patching.target import Target
from ..bitsandbytes.stacks import functions, is_managed, packed_chains
from ..transformers.experts import implementation_of, supports
from ..unsloth import FIXED, LAYOUT, LAYOUTS
from ..unsloth import NAME as UNSLOTH

# Each rank is padded to a multiple of RANKS, because the rows in PyTorch's grouped_mm must be multiples of 16 bytes.
RANKS = 8


def packed_states(module: Any) -> dict[str, Any]:
    """Return the QuantState of each packed stack without a second parametrization, such as peft's LoRA, by name."""
    return {name: chain[0].quant_state for name, chain in packed_chains(module).items() if len(chain) == 1}


# --- the forward ---


class Wrapper:
    """A ``ParamWrapper`` of peft and its active adapters, while its forward runs."""

    def __init__(self, wrapper: Any, adapters: list[str], dtype: torch.dtype):
        self.wrapper, self.adapters, self.dtype = wrapper, adapters, dtype
        self.experts, self.name = wrapper.get_base_layer(), wrapper.parameter_name
        self.is_asked = False

    def factors(self) -> Lora:
        """Return (left, right) of all active adapters, concatenated along the rank, in the shapes of ``moe.product.Lora``.

        peft would add left @ right to the stack. It stores lora_A as [experts * rank, in], and lora_B as [out, rank *
        experts].
        """
        wrapper, into, out_of = self.wrapper, [], []
        for name in self.adapters:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight * wrapper.scaling[name]
            into.append(a.reshape(wrapper.num_experts, -1, a.shape[-1]).to(self.dtype))
            out_of.append(b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1).to(self.dtype))
        a, b = torch.cat(into, dim=1), torch.cat(out_of, dim=2).contiguous()
        if missing := -a.shape[1] % RANKS:
            a, b = pad(a, (0, 0, 0, missing)), pad(b, (0, missing))
        # Before 0.19, peft mistook a stack [experts, out, in] for [experts, in, out], which swapped the roles of A and B.
        return (b, a) if getattr(wrapper, "_did_swap_in_out_features", False) else (a.mT, b.mT)


def forward(target: Target, original: Function) -> Function:
    """Replace ``ParamWrapper.forward`` to register the wrapper in ``active_wrappers``."""

    def run(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        experts, name = self.get_base_layer(), self.parameter_name
        adapters = [adapter for adapter in self.active_adapters if adapter in self.lora_A]
        idle = self.disable_adapters or self.merged or self.num_experts == 1 or not adapters
        state = None if idle else packed_states(experts).get(name)
        if idle or kwargs.get("adapter_names") or not supports(experts, name, state is not None):
            return original(self, x, *args, **kwargs)
        wrapper = Wrapper(self, adapters, (state or experts._parameters[name]).dtype)
        before = active_wrappers.wrappers
        try:
            active_wrappers.wrappers = (*before, wrapper)
            result = self.base_layer(x, *args, **kwargs)
        finally:
            active_wrappers.wrappers = before
        if wrapper.is_asked:
            return result
        raise RuntimeError(
            f"the forward of {parametrize.type_before_parametrizations(experts).__name__} did not use the LoRA adapters on its {name}, "
            f"with experts_implementation {implementation_of(experts)!r}. Please report this, with the output of nf4_patch.status()"
        )

    return replacement_of(target, original, Fallbacks(target.name), instead(run), torch._dynamo.disable(run))


# --- loading and merging adapters ---


@contextmanager
def seen_dense(module: Any) -> Iterator[None]:
    """Show peft the packed stacks of a module as dense parameters without memory.

    Otherwise, peft would find a parametrized weight only by its full name, and would visit the stacks in another order,
    which decides the names in the adapter's file. In transformers' classes, the down projection comes last.
    """
    dense = {}
    for name, state in packed_states(module).items():
        element = torch.empty((), dtype=state.dtype, device=module.parametrizations[name].original.device)
        dense[name] = torch.nn.Parameter(element.expand(state.shape), requires_grad=False)
    kind, parameters = type(module), dict(module._parameters)
    parametrizations = module._modules["parametrizations"]

    try:
        del module._modules["parametrizations"]
        module.__class__ = parametrize.type_before_parametrizations(module)
        module._parameters.clear()
        module._parameters.update(sorted((dense | parameters).items(), key=lambda item: item[0].startswith("down")))
        yield
    finally:
        module.__class__ = kind
        module._modules["parametrizations"] = parametrizations
        module._parameters.clear()
        module._parameters.update(parameters)


@around
def read_config(original: Function, cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``PeftConfigMixin.from_json_file`` to preserve two facts about an adapter's file.

    peft drops unknown fields, so copy Unsloth's layout of lora_B to ``auto_mapping``, where newer Unsloth stores it.
    peft would set a missing ``peft_version`` to its own version, so set it to 0.17.
    """
    written = original(cls, *args, **kwargs)
    if found := {key: written[key] for key in (LAYOUT, LAYOUTS) if key in written}:
        written["auto_mapping"] = (written.get("auto_mapping") or {}) | found
    if (
        written.get("target_parameters")
        and "peft_version" in cls.__dataclass_fields__
        and not written.get("peft_version")
    ):
        written["peft_version"] = "0.17"
    return written


def refuse_layouts(module: Any, stacks: dict[str, Any], peft_config: Any) -> None:
    """Raise an error if the adapter's tensors have the right shapes, but an order that peft misreads.

    Of ``stacks``, by name, only the shape [experts, ...] is used.

    Raises:
        ValueError: peft before 0.19 wrote the adapter and swapped A and B, which the shapes of square experts do not show. Or
            Unsloth before 2026.9.6 wrote it, with lora_B as [out, experts * rank].
    """
    import peft
    from packaging.version import parse

    swapped = parse("0.19.0.dev0")
    written = getattr(peft_config, "peft_version", None) or peft.__version__
    earlier = parse(written.partition("@")[0]) < swapped <= parse(peft.__version__)
    said = getattr(peft_config, "auto_mapping", None) or {}
    detail = said.get(LAYOUTS) or {}
    of_each = detail.get("parameters") or {}
    named = {each.rpartition(".")[2] for each in getattr(peft_config, "target_parameters", None) or ()}
    for name in named & stacks.keys():
        shape = list(stacks[name].shape)
        if earlier and shape[1] == shape[2] and not getattr(module, "is_transposed", False):
            raise ValueError(
                f"peft {written} wrote this adapter and swapped A and B of {name}, {shape}. peft {peft.__version__} would load them "
                'the wrong way round. Train the adapter again, or load it with peft 0.18. A file without "peft_version" counts as 0.17'
            )
        layout = (of_each.get(name) or {}).get(LAYOUT) or detail.get(LAYOUT) or said.get(LAYOUT)
        by_unsloth = layout is not None or said.get(FIXED)
        if by_unsloth and layout != "rank_major" and UNSLOTH not in sys.modules:  # Unsloth converts the layout itself
            raise ValueError(
                f"Unsloth wrote this adapter with {LAYOUT} {layout or 'not named, as before 2026.9.6'} for {name}, but peft reads "
                "rank_major. Load the adapter with Unsloth 2026.9.6 or newer and save it again. Or reorder lora_B as "
                f'docs/after-training.md shows, and write "{LAYOUT}": "rank_major" into adapter_config.json'
            )


def refuse_copies(module_name: str, peft_config: Any) -> None:
    """Raise an error if peft would copy a module with packed stacks, and with it the placeholders of ``seen_dense``.

    Raises:
        ValueError: ``modules_to_save`` names the module or a parent of it, or ``layer_replication`` is set.
    """
    parts = module_name.split(".")
    parents = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for wanted in getattr(peft_config, "modules_to_save", None) or ():
        if any(parent.endswith(wanted) for parent in parents):
            raise ValueError(
                f"modules_to_save names {wanted!r}, but the experts in {module_name} are packed in 4 bits and cannot be trained. "
                "modules_to_save may name modules without packed experts. Train these experts with LoRA "
                '(target_parameters=["experts.gate_up_proj", "experts.down_proj"]), or load them in 16 bits '
                '(llm_int8_skip_modules=["experts"])'
            )
    if getattr(peft_config, "layer_replication", None):
        raise ValueError(
            f"layer_replication copies layers, but the experts in {module_name} are packed in 4 bits. It works for experts in "
            '16 bits only. Remove layer_replication, or load the experts in 16 bits (llm_int8_skip_modules=["experts"])'
        )


@around
def inject(original: Function, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    """Replace ``BaseTuner.inject_adapter``, which looks up the modules and parameters that an adapter's config names.

    A packed stack's parametrization is a module with the stack's name, such as ``down_proj``, on which peft would put
    LoRA. So show peft a dense parameter instead.
    """
    from ..bitsandbytes.packed import Chain, end_caching

    on = switch.gates["experts"].on
    with ExitStack() as stack:
        for module_name, module in list(model.named_modules(remove_duplicate=False)):
            chains, states = packed_chains(module), packed_states(module)
            managed = on or any(map(is_managed, chains.values()))
            if managed:
                dense = {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 3}
                refuse_layouts(module, states | dense, self.peft_config[adapter_name])
            if chains and managed and len(states) == len(module.parametrizations):
                refuse_copies(module_name, self.peft_config[adapter_name])
                end_caching(module)
                for chain in chains.values():
                    chain.__class__ = Chain
                stack.enter_context(seen_dense(module))
        return original(self, model, adapter_name, *args, **kwargs)


@around
def packed_again(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``ParamWrapper.merge`` and ``unmerge`` to requantize the stack that peft changed.

    After an interrupt, the packed stack and ``merged_adapters`` are both changed or both unchanged.
    """
    experts, name = self.get_base_layer(), self.parameter_name
    chain, adapters = packed_chains(experts).get(name), self.merged_adapters
    if chain is None:
        original(self, *args, **kwargs)
        return
    from ..bitsandbytes.packed import Chain

    chain.__class__ = Chain
    # With ``parametrize.cached()``, ``requantize`` reads the dense weight into which peft wrote. Inference mode must be
    # off, because training cannot use tensors that were made in inference mode.
    with torch.inference_mode(False), torch.no_grad(), parametrize.cached(), ExitStack() as stack:
        stack.callback(parametrize._cache.clear)
        stack.callback(vars(self).__setitem__, "merged_adapters", adapters)
        # Give peft a copy of the list, because ``requantize`` updates the original list.
        vars(self)["merged_adapters"] = list(adapters)
        try:
            original(self, *args, **kwargs)
        except Exception:  # an adapter was broken, but peft has already merged the adapters before it
            requantize(self, chain, adapters)
            raise
        requantize(self, chain, adapters)


def requantize(wrapper: Any, chain: Any, adapters: list[str]) -> None:
    """Requantize a stack after a merge, or restore the original bytes if no adapter is merged any more.

    ``adapters`` lists the adapters that are merged into the packed bytes so far, and is updated in place.
    """
    from ..bitsandbytes.packed import content_of

    after = list(wrapper.merged_adapters)
    if after == adapters:
        return
    # The wrapper stores the original bytes as an attribute, so that they are freed when the adapter is removed.
    saved = vars(wrapper).get("nf4_patch_merged") if adapters else chain.before_merging()
    # If other code changed the merged stack, restoring the original bytes would undo this change.
    if saved is not None and adapters and saved.content != chain.content():
        saved = None
    if saved is not None and not after:
        packed, state, saved = saved.packed, saved.state, None
    else:
        state = chain[0].quant_state
        packed, state = functions().quantize_4bit(
            getattr(wrapper.get_base_layer(), wrapper.parameter_name), blocksize=state.blocksize, compress_statistics=state.nested,
            quant_type=state.quant_type, quant_storage=chain.original.dtype,
        )  # fmt: skip
        saved = saved and saved._replace(content=content_of(packed, state))

    def replace() -> None:
        chain.replace(packed, state)
        vars(wrapper)["nf4_patch_merged"] = saved
        adapters[:] = after

    try:
        replace()
    except BaseException:  # an interrupt might have stopped ``replace`` halfway, so run it again
        replace()
        raise
